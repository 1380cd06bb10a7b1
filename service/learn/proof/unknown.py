"""Tells the user whether a model of an unsupported family would be trained correctly, by running the proof's
comparisons."""

from __future__ import annotations

from pathlib import Path

from service.errors import UserError
from service.model_folder import FAMILIES, is_model_folder, model_config, text_part, unsupported


def refuse_unknown(folder: Path | None) -> None:
    """Refuse a model of an unsupported family, after the proof's comparisons, which take up to 20 seconds on a CPU.

    Raises:
        UserError: the family is not supported; the message names the first comparison that fails, if any fails.
    """
    if folder is None or not is_model_folder(folder):
        return
    config = model_config(folder)
    reason = unsupported(config)
    if reason is not None and str(text_part(config).get("model_type")).removesuffix("_text") not in FAMILIES:
        raise UserError(f"model.path: {folder} cannot be trained: {reason}; a check of it just now {_found(folder)}")


def _found(folder: Path) -> str:
    # Loaded here, because runs of known families need none of it.
    from service.learn.model.hf_config import read_config
    from service.learn.proof.prove import prove
    from service.learn.proof.small import shrunk

    try:
        findings = prove(shrunk(read_config(folder, proven=False)))
    except (AttributeError, KeyError) as error:
        return f"fails: its configuration lacks what all families have: {error}"
    failed = [finding for finding in findings if not finding.holds]
    return f"fails at {failed[0].name!r}: {failed[0].told}" if failed else "finds it trained rightly"
