"""A folder whose files are named like modules of Python, of Ray and of Baton."""

from pathlib import Path

NAMES = (
    "html.py", "ray.py", "actors.py", "json.py", "yaml.py", "torch.py", "pickle.py", "service/__init__.py",
    "service/__main__.py", "multiprocessing/__init__.py",
)  # fmt: skip

ENVIRONMENT = """
import html
import os
import subprocess
import sys
from pathlib import Path

from service.rollout.environment import StepResult


class Escape:
    async def reset(self, task, seed):
        child = subprocess.run([sys.executable, "beside/program.py"], capture_output=True, text=True)
        loaded = [html.__file__, str(Path.cwd()), child.stdout.strip()]
        Path(os.environ["LOADED"]).write_text("\\n".join(loaded))
        return [{"role": "user", "content": html.escape("0")}]

    async def step(self, text):
        return StepResult([], reward=float(len(text) % 2), done=True)

    async def close(self): ...


def vocabulary():
    return ("0", "1")
"""


def make(folder: Path) -> Path:
    """Write the folder; a file in it that is executed ends the process, and leaves its name in `executed`."""
    for name in NAMES:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        executed = folder / "executed"
        file.write_text(f"open({str(executed)!r}, 'a').write({name!r}); raise SystemExit('executed: {name}')\n")
    (folder / "my_envs.py").write_text(ENVIRONMENT)
    (folder / "rows.jsonl").write_text('{"prompt": "0"}\n')
    (folder / "beside").mkdir()
    (folder / "beside" / "program.py").write_text("import helper\nprint(helper.WORD)\n")
    (folder / "beside" / "helper.py").write_text("WORD = 'helped'\n")
    return folder
