"""The retrieval server as an actor of a run."""

from __future__ import annotations

import logging
import os
import socket
from threading import Thread
from typing import Any

import ray

from actors.observe.logs import keep_log
from service.config import Config
from service.config.rollout import RetrievalConfig
from service.errors import RunFailed
from service.rollout.retrieval.retriever import Retriever, open_retriever
from service.rollout.retrieval.server import BACKLOG, serve
from service.user_code import enter_user_folder

log = logging.getLogger(__name__)


class RetrievalServer:
    """Serves one corpus at its node's address, from its construction on; the caller wraps it as a Ray actor."""

    def __init__(self, config_json: str) -> None:
        keep_log("retrieval")
        enter_user_folder()
        config = RetrievalConfig.model_validate_json(config_json)
        host = ray.util.get_node_ip_address()
        retriever = open_retriever(config, "cuda" if ray.get_gpu_ids() else "cpu")
        self._socket = socket.create_server((host, config.port), backlog=BACKLOG)
        self._url = f"http://{host}:{self._socket.getsockname()[1]}/retrieve"
        Thread(target=self._serve, args=(retriever,), daemon=True, name="retrieval").start()

    def url(self) -> str:
        """The address of `POST /retrieve`."""
        return self._url

    def _serve(self, retriever: Retriever) -> None:
        try:
            serve(retriever, self._socket, handle_signals=False)
        finally:
            log.error("the retrieval server at %s ended", self._url)
            os._exit(1)


def with_retrieval(config: Config, has_gpu: bool) -> tuple[Config, Any | None]:
    """Start the configured retrieval server, if any; returns the configuration with its address, and its actor.

    Raises:
        RunFailed: the server did not start, or not in time.
    """
    retrieval = config.env.retrieval
    if retrieval is None:
        return config, None
    actor = (
        ray.remote(RetrievalServer)
        .options(num_cpus=retrieval.cpus, num_gpus=retrieval.gpus if has_gpu else 0, max_restarts=-1)
        .remote(retrieval.model_dump_json())
    )
    try:
        url = ray.get(actor.url.remote(), timeout=retrieval.start_deadline)
    except ray.exceptions.GetTimeoutError:
        waited = f"{retrieval.start_deadline:.0f} s"
        raise RunFailed(f"env.retrieval: the server did not start within {waited}; is a GPU left for it?") from None
    except ray.exceptions.RayActorError as error:
        raise RunFailed(f"env.retrieval: the server did not start: {str(error).strip().splitlines()[-1]}") from error
    env = config.env.model_copy(update={"options": {**config.env.options, "url": url}})
    return config.model_copy(update={"env": env}), actor
