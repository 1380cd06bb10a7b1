"""One conversation with the template of each family: through an environment, and through each dialect of the endpoint.

Each template is made by its family's published rules: the frames of turns, how calls and answers of tools are written,
what is refused. The witness is the template itself, which transformers renders without Baton.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
from tokenizers import AddedToken

from service.agents.messages_and_replies import read_messages
from service.model_folder import FAMILIES
from service.rollout.chat.chat import Chat, MessagesRefused
from service.rollout.engine import Sampling
from service.rollout.environment import Message, StepResult, Task
from service.rollout.prompts.conversations import rows_with_loss_mask
from tests.pure.agents.endpoint import client_of, opened
from tests.pure.agents.talks import SEARCH, TALKS, ChatTalk, exchange
from tests.pure.rollout.conftest import ScriptedEngine, ScriptedEnvironment, play
from tests.pure.rollout.test_special_tokens import tokenizer_of


class Form(NamedTuple):
    """What is written before and after a message of the role ROLE, for a tool's answer and for a call, and what is
    refused."""

    before: str
    after: str
    tool: str
    call: str = "\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    refused: str = ""
    begin: str | None = None
    """What begins the policy's turn; None: what stands before a message."""


SAID = "{{ m.content }}"
NO = "{{ raise_exception('no') }}"
BEFORE, AFTER = "messages[loop.index0 - 1]", "messages[loop.index0 + 1]"
FIRST, LAST = f"{{% if {BEFORE}.role != 'tool' %}}", f"{{% if loop.last or {AFTER}.role != 'tool' %}}"
NINE = "{% if ID | length != 9 %}" + NO + "{% endif %}"
INST, CLOSED = "{% if m.role == 'user' %}[INST]{% endif %}", "{{ '[/INST]' if m.role == 'user' else '</s>' }}"
RESULT = '[RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/RESULTS]'
BEGUN = "(loop.index0 - (messages[0].role == 'system'))"
ALTERNATE = f"{{% if (m.role == 'user') != ({BEGUN} % 2 == 0) %}}{NO}{{% endif %}}"
ONE = "{% if m.tool_calls and m.tool_calls | length > 1 %}" + NO + "{% endif %}"
CALLED = f"{{% if not {BEFORE}.tool_calls and {BEFORE}.role != 'tool' %}}{NO}{{% endif %}}"
FORMS = {
    "qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next smollm3 olmo3 arcee hunyuan_v1_dense": Form(
        "<|im_start|>ROLE\n",
        "<|im_end|>\n",
        f"{FIRST}<|im_start|>user{{% endif %}}\n<t>\n{SAID}\n</t>{LAST}<|im_end|>\n{{% endif %}}",
    ),
    "llama": Form("<|start|>ROLE<|stop|>\n\n", "<|eot|>", f"<|start|>ipython<|stop|>\n\n{SAID}<|eot|>", refused=ONE),
    "granite": Form("<|role|>ROLE<|stop|>", "<|eot|>\n", f"<|role|>tool_response<|stop|>{SAID}<|eot|>\n"),
    "seed_oss exaone4 ernie4_5": Form("<s>ROLE\n", "</s>", f"<s>tool\n{SAID}</s>"),
    "mistral ministral3": Form(
        INST,
        CLOSED,
        NINE.replace("ID", "m.tool_call_id") + RESULT,
        NINE.replace("ID", "c.id") + "[CALLS]{{ c.function | tojson }}{{ c.id }}",
        begin="",
    ),
    "glm glm4 glm4_moe": Form("<|ROLE|>\n", "", f"{FIRST}<|observation|>{{% endif %}}\n<t>{SAID}</t>"),
    "gpt_oss": Form(
        "<|start|>ROLE{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}{% endif %}<|message|>",
        "{{ '<|call|>' if m.tool_calls else '<|end|>' }}",
        f"{CALLED}<|start|>functions.{{{{ m.name }}}}<|message|>{SAID}<|end|>",
        "{{ c.function.arguments | tojson }}",
        begin="<|start|>assistant",
    ),
    "gemma gemma3 cohere cohere2": Form("<|start|>ROLE\n", "<|end|>\n", NO, "", ALTERNATE),
    "phi3 starcoder2 olmo2 olmoe flex_olmo": Form("<|ROLE|>\n", "<|end|>\n", "", ""),
}
TEMPLATE = (
    "{% for m in messages %}REFUSED{% if m.role == 'tool' %}TOOL{% else %}BEFORE"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}AFTER{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}BEGIN{% endif %}"
)
CALL = '<tool_call>{{"name": "search", "arguments": {{"query": "{}"}}}}</tool_call>'
SAYS = [f"<think>\nplan\n</think>\n\nLook.{CALL.format('a')}{CALL.format('b')}", "done", CALL.format("c"), "end"]
TOOL = {"type": "function", "function": {"name": "search", "description": "look", "parameters": SEARCH}}
CELLS = [
    pytest.param(families, talk, marks=() if row % 4 == column else pytest.mark.full)
    for row, families in enumerate(FORMS)
    for column, talk in enumerate((None, *TALKS))
]


def tokenizer_for(form: Form) -> Any:
    """A tokenizer with the form's special tokens and template."""
    template = TEMPLATE
    begin = form.before.replace("ROLE", "assistant") if form.begin is None else form.begin
    parts = {"REFUSED": form.refused, "TOOL": form.tool, "CALL": form.call, "BEFORE": form.before, "AFTER": form.after}
    for name, part in {**parts, "BEGIN": begin, "ROLE": "{{ m.role }}"}.items():
        template = template.replace(name, part)
    tokenizer = tokenizer_of(template)
    names = re.findall(r"<\|\w+\|>|\[/?[A-Z]+\]", f"{template}<|user|><|assistant|><|system|>")
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    return tokenizer


def conversation(ids: Sequence[str]) -> list[Any]:
    """The whole conversation as chat completions has it."""
    calls = [
        {"type": "function", "id": of, "function": {"name": "search", "arguments": {"query": query}}}
        for of, query in zip(ids, "abc", strict=True)
    ]
    answers = [{"role": "tool", "tool_call_id": of, "name": "search", "content": "ANSWER"} for of in ids]
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "plan", "tool_calls": calls[:2]},
        *answers[:2],
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "next"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        answers[2],
        {"role": "assistant", "content": "end"},
        {"role": "user", "content": "more"},
    ]


PROMPTS = (5, 7, 9)
"""The number of messages in the second prompt and in further ones."""


async def in_environment(chat: Chat, ids: Sequence[str]) -> list[str]:
    """What each further prompt adds in an environment's trajectory."""
    talk, says = conversation(ids), iter(SAYS)
    results = [StepResult(messages, 0.0, False) for messages in (talk[3:5], talk[6:7], talk[8:9])]
    steps, _ = await play(
        chat,
        ScriptedEngine(chat, lambda words: next(says)),
        ScriptedEnvironment([*results, StepResult([], 1.0, True)]),
        Task("p-0", tuple(talk[:2]), "scripted", tools=(TOOL,)),
        max_input_length=9000,
        sampling=Sampling(9000, stop_token_ids=chat.end_ids),
    )
    return [chat.text(step.prompt_ids, True) for step in steps[1:]]


async def by_client(chat: Chat, make: type[ChatTalk]) -> tuple[list[str], list[str], str | None]:
    """What each further prompt of a client adds; the ids of its calls; and the whole prompt after the client changed
    its first message, None if it is refused."""
    async with opened(chat) as server:
        says, session, talk = iter([*SAYS, ""]), server.session(), make("hi")
        server.say = lambda prompt: next(says)
        async with client_of(server, session) as client:
            for told in ("ANSWER", "next", "ANSWER", "more"):
                await exchange(client, talk, told)
            sent = [*getattr(talk, "messages", ()), *getattr(talk, "input", ())]
            next(one for one in sent if one.get("role") == "user")["content"] = "changed"
            status, _ = await client.post(talk.path, talk.body())
        calls = session.tree.calls
    added = [chat.text(call.carried_ids, True) for call in calls[1:4]]
    whole = chat.text(calls[4].carried_ids, True) if status == 200 else None
    return added, [*calls[0].ids, *calls[2].ids], whole


@pytest.mark.parametrize(("families", "make"), CELLS)
async def test_what_the_next_prompt_holds_is_what_the_template_renders(
    families: str, make: type[ChatTalk] | None
) -> None:
    form, whole = FORMS[families], None
    tokenizer = tokenizer_for(form)
    chat = Chat(tokenizer)
    ids: Sequence[str] = ("call_a_0", "call_a_1", "call_b_0")
    if make is None:
        added = await in_environment(chat, ids)
    else:
        added, ids, whole = await by_client(chat, make)
    if "length != 9" in form.tool:
        ids = [xxhash.xxh3_64_hexdigest(of.encode())[:9] for of in ids]
    told = any("they become messages of the user" in note for note in chat.notes(has_tools=False))
    assert told == (not form.call), "the run says at its start whose the answers are"
    assert any("leaves out earlier calls" in note for note in chat.notes(has_tools=True)) == (not form.call)
    talk = conversation(ids)
    if form.refused == ONE:
        del talk[2]["tool_calls"][1:]

    def rendered(messages: list[Any]) -> str:
        if not form.call:
            messages = [*messages[:3], {"role": "user", "content": "ANSWER\nANSWER"}, *messages[5:]]
            messages = [one | {"role": "user" if one["role"] == "tool" else one["role"]} for one in messages]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    for n_messages, text, (word, times) in zip(
        PROMPTS, added, (("ANSWER", 2), ("next", 1), ("ANSWER", 1)), strict=True
    ):
        assert rendered(talk[:n_messages]).endswith(text) and text.count(word) == times
    if form.refused == ONE:
        assert whole is None
    elif make is not None:
        talk[1]["content"] = "changed"
        assert whole == rendered(talk)


@pytest.mark.parametrize("read", [list, read_messages], ids=["data", "clients"])
@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", "a"), (None, None)])
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("have_ids", [("search", "fetch"), ("search",), ()])
def test_an_answer_of_a_tool_has_the_name_of_its_call_also_if_ids_come_again_or_are_missing(
    read: Any, first: str | None, second: str | None, turns: int, have_ids: tuple[str, ...]
) -> None:
    given = {"search": first, "fetch": second}
    calls = [
        {"type": "function", "id": of, "function": {"name": name, "arguments": "{}"}} for name, of in given.items()
    ]
    answers = [
        {"role": "tool", "content": f"from {name}", **({"tool_call_id": of or name} if name in have_ids else {})}
        for name, of in given.items()
    ]
    asked = {"role": "assistant", "content": ""}
    one = [{**asked, "tool_calls": calls}, *answers]
    two = [{**asked, "tool_calls": calls[:1]}, answers[0], {**asked, "tool_calls": calls[1:]}, answers[1]]
    chat = Chat(tokenizer_for(FORMS["gpt_oss"]))
    text = chat.text(chat.prompt(read([{"role": "user", "content": "hi"}, *(one if turns == 1 else two)])), True)
    assert all(f"<|start|>functions.{name}<|message|>from {name}<|end|>" in text for name in given)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"tool_calls": [{"name": "search", "arguments": {}}]}, 'a call needs "function" with a name'),
        ({"tool_calls": ["search"]}, 'a call needs "function" with a name'),
        ({"tool_calls": [{"id": [1], "function": {"name": "search"}}]}, "an id that is a text"),
        ({"tool_calls": [{"function": "search"}]}, 'a call needs "function" with a name'),
        ({"function_call": {"name": "search", "arguments": "{}"}}, "write the call into `tool_calls`"),
    ],
)
def test_a_call_that_no_template_can_show_is_refused(call: Any, told: str) -> None:
    chat = Chat(tokenizer_for(FORMS["llama"]))
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", **call}]
    with pytest.raises(MessagesRefused, match=told):
        chat.prompt([*messages, {"role": "tool", "content": "17"}])


@pytest.mark.parametrize("families", FORMS)
def test_a_supervised_row_writes_answers_as_the_template_does(families: str) -> None:
    chat = Chat(tokenizer := tokenizer_for(FORMS[families]))
    assert chat.said(chat.answer("yes")) == "yes"
    talk = [*conversation("abc")[:2], Message(role="assistant", content="yes")]
    (row,) = rows_with_loss_mask(chat, "append", [talk])
    ends = "|".join(re.escape(chat.text(np.array([end]), True)) for end in chat._all_ends)
    written, rendered = chat.text(row.token_ids, True), tokenizer.apply_chat_template(talk, tokenize=False)
    assert re.sub(ends, "", written) == re.sub(ends, "", str(rendered)).rstrip("\n")


def test_every_family_has_a_form() -> None:
    assert sorted(" ".join(FORMS).split()) == sorted(FAMILIES)
