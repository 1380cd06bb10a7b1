"""Retrieval: encoders, a flat index, the server and its client.

The server answers `POST /retrieve` as Search-R1's and SkyRL's do:

    {"query": "marn"} or {"queries": ["marn"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "marn is a town ..."}, "score": 0.9}]]}
"""
