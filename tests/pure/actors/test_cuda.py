"""GPUs that PyTorch cannot use are refused at once."""

from __future__ import annotations

import warnings

import pytest
import torch

from actors.cuda import refuse_unusable_cuda
from service.errors import UserError


def test_a_pytorch_without_cuda_is_refused_on_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"has 8 NVIDIA GPUs, but PyTorch cannot use them: it was built without CUDA"):
        refuse_unusable_cuda(8)


def test_a_driver_that_is_too_old_is_refused_in_one_line_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_driver() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old (found version 12040).\nPlease update", stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    with pytest.raises(UserError, match=r"too old \(found version 12040\)\. \(PyTorch's CUDA is 13\.0\)") as refused:
        refuse_unusable_cuda(1)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refuse_unusable_cuda(1)
