"""Sends weights from the trainer to the engines. Four terms:

    part      the bytes of the weights file that one rank holds           `part.py`
    source    a part or an image, in shared memory of the host whose      `memory.py`, `pulled.py`
              engines pull from it
    bucket    bytes of a part that travel to other hosts as one message   `part.py`
    image     the file in a node's shared memory that buckets fill, or    `image.py`, `node_images.py`
              that is read as a whole with NIXL                           `nixl_reads.py`

A rank and an engine that share a GPU may share weights there without files, by CUDA IPC (`cuda_ipc.py`).
"""
