"""Errors of actors in one line."""

from ray.exceptions import RayActorError

from actors.calls import MAX_CHARACTERS, in_a_line

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: TrainerRank
\tpid: 17
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process \
is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called."""


def test_a_process_that_died_is_one_line_without_guesses_at_the_cause() -> None:
    said = in_a_line(RayActorError(error_msg=DIED))
    assert said == "its process died: Worker unexpectedly exits with a connection error code 2; see its log"


def test_a_long_line_is_cut_between_words() -> None:
    said = in_a_line(RuntimeError("a traceback\n" + "word " * MAX_CHARACTERS))
    assert len(said) <= MAX_CHARACTERS and set(said.split()) == {"word", "..."}
    assert in_a_line(ValueError()) == "ValueError"
