"""Sends weights from the trainer to the engines. Four terms:

    part      the bytes of the weights file that one rank holds           `part.py`
    bucket    bytes of a part that travel as one message                  `part.py`
    chain     the way of the buckets from the ranks over several nodes    `chain.py`
    image     the file in a node's shared memory that buckets fill and    `image.py`, `node_images.py`
              engines load from

Engines pull from the parts on their own host, or from its image (`pulled.py`, `memory.py`).
With NVIDIA GPUs weights may go without files: by broadcast (`nccl_broadcast.py`), or by CUDA IPC (`cuda_ipc.py`).
"""
