"""Thin Ray actors around the classes of `service`, and the driver that starts them."""

import os

RAY_ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "60",
    # A cut network link leaves connections that only one end considers open. With Ray's defaults of 300 and 120 s,
    # weights are delayed for 420 s. Ray's servers refuse more than one keepalive ping a minute.
    "RAY_grpc_client_keepalive_time_ms": "60000",
    "RAY_grpc_client_keepalive_timeout_ms": "20000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of the Ray processes that a run starts, and of Ray's workers."""

SKIPPED = (
    r"^Task \S+ failed\. There are .*retries remaining"
    r"|^The node with node id: .* has been marked dead"
    r"|^Raylet is terminated\."  # with the last twenty lines of its log
    r"|^A worker died or was killed while executing a task"
)
"""Patterns of raylet messages that are not printed. When a host or a process ends, Ray sends such a message for each
call, node and process. Instead, the run reports the end in one line (in `Supervisor`, `HostWatch`, or the code that
waits for a generator or rank)."""
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", SKIPPED)

USER_IS_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "0").upper() not in ("", "0", "FALSE", "NO", "OFF")
"""Whether the user forbids requests to model hubs; Baton makes such requests only for hub addresses in the settings."""

if not os.environ.get("RAY_ADDRESS"):
    # Ray reads its settings when it is imported, and every module of this package imports Ray after this one.
    for key, value in RAY_ENV.items():
        os.environ.setdefault(key, value)
