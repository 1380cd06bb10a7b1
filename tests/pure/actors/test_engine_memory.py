"""An engine that cannot fit is refused before it is started, with what to change."""

from pathlib import Path

import pytest

from actors.generator.engine_arguments import engine_arguments
from service.config import load_config
from service.errors import UserError
from service.run.prepare import prepare

QUICKSTART = "configs/quickstart.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(load_config([QUICKSTART]), tmp_path_factory.mktemp("made")).model_folder


def test_a_cache_too_small_for_one_request_is_named_with_what_one_takes(model: Path) -> None:
    small = load_config([QUICKSTART], ["generator.kv_cache_bytes=1000"])
    with pytest.raises(UserError, match=r"kv_cache_bytes: 1000 cannot hold one request .* takes (\d+) bytes") as caught:
        engine_arguments(small, model)
    takes = str(caught.value).split(" takes ")[1].split()[0]
    engine_arguments(load_config([QUICKSTART], [f"generator.kv_cache_bytes={takes}"]), model)


def test_a_cache_beyond_the_free_memory_names_the_settings_that_make_it_smaller(model: Path) -> None:
    huge = load_config([QUICKSTART], [f"generator.kv_cache_bytes={1 << 50}"])
    with pytest.raises(UserError, match=r"MiB are free: lower generator\.max_input_length"):
        engine_arguments(huge, model)
