"""A run does not start on a Ray that obeys everybody."""

from __future__ import annotations

from collections.abc import Mapping

from service.errors import UserError


def refuse_open_ray(environment: Mapping[str, str], insecure_local: bool) -> None:
    """Ray's processes listen on all interfaces, and without its token whoever reaches them runs code as this user.

    Raises:
        UserError: authentication is switched off, and the configuration does not say that this is meant.
    """
    if environment.get("RAY_AUTH_MODE", "token") != "token" and not insecure_local:
        raise UserError(
            f"RAY_AUTH_MODE={environment['RAY_AUTH_MODE']}: without a token whoever reaches this machine's ports can "
            "run code on it; unset it, or set run.insecure_local=true on a machine that nobody else reaches"
        )
