"""The tokenizer made by the project, and chats over it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from baton.examples import lookup
from service.agents.conversation_tree import ConversationTree
from service.agents.messages_and_replies import JsonCalls
from service.config import GeneratorConfig
from service.errors import UserError
from service.rollout.chat.chat import BREAK, Chat, MessagesRefused, load_chat
from service.rollout.chat.conversation import with_end
from service.rollout.chat.tokenizer import END, load_tokenizer, make_tokenizer
from service.rollout.environment import Message, StepResult
from service.rollout.prompts.conversations import rows_with_loss_mask
from service.types import Int32s
from tests.pure.rollout.conftest import ScriptedEngine, ScriptedEnvironment, generated, play, templated
from tests.pure.rollout.test_special_tokens import THINKING_AND_JSON, tokenizer_of

ASK = [Message(role="user", content="what is the age of fox ?")]
TOLD = [Message(role="user", content="17")]


def test_a_made_tokenizer_reads_the_same_beside_the_config_of_its_model(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    alone = Chat(load_tokenizer(tmp_path)).prompt(ASK).tolist()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    assert Chat(load_tokenizer(tmp_path)).prompt(ASK).tolist() == alone
    assert len(alone) == 12


@pytest.mark.parametrize(("family", "named"), [("llama", "LlamaTokenizerFast"), ("qwen2", "Qwen2Tokenizer")])
def test_tokenizer_json_decides_the_tokens_and_not_the_class_that_the_folder_names(
    tmp_path: Path, family: str, named: str
) -> None:
    backend, text = Tokenizer(BPE()), "in 2023  it is"
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator([text, text], trainer)
    backend.add_special_tokens([END])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "tokenizer_class": named}))
    (tmp_path / "chat_template.jinja").write_text(CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT)
    chat = Chat(load_tokenizer(tmp_path))
    (whole,) = chat.plain(text).tolist()  # one token, though other tokenizers would split the text
    assert chat.text(np.array([whole], np.int32)) == text


def test_a_tag_that_the_tokenizer_calls_special_stays_in_the_text_and_frames_and_ends_do_not() -> None:
    tokenizer = tokenizer_of(THINKING_AND_JSON)
    tags = ("<seed:think>", "</seed:think>", "[TOOL_CALLS]", "<|vision|>", "[INST]", "[/INST]", "[UNK]")
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags], special_tokens=True)
    said = "<|im_start|><seed:think>plan</seed:think> [TOOL_CALLS]f{}<|vision|></s>"
    token_ids = np.array(tokenizer.encode(said, add_special_tokens=False), np.int32)
    assert Chat(tokenizer).text(token_ids) == "<seed:think>plan</seed:think> [TOOL_CALLS]f{}"
    told = "{% for m in messages %}{{ {'user': '[INST]%s[/INST]'}.get(m.role, '%s</s>') % m.content }}{% endfor %}"
    tokenizer.unk_token, tokenizer.chat_template = "[UNK]", told
    token_ids = np.array(tokenizer.encode("a[TOOL_CALLS]b[UNK][/INST][INST]", add_special_tokens=False), np.int32)
    assert Chat(tokenizer).text(token_ids) == "a[TOOL_CALLS]b"
    tokenizer.chat_template = told.replace("[INST]", "").replace("[/INST]", "") + "<seed:think>"
    token_ids = np.array(tokenizer.encode("<seed:think>a", add_special_tokens=False), np.int32)
    assert Chat(tokenizer).text(token_ids) == "<seed:think>a", "thinking that the prompt begins is no frame"


def test_of_several_templates_one_is_named_for_first_prompts_and_for_what_follows() -> None:
    tokenizer = tokenizer_of("")
    other = CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT.replace("<tool_response>", "<result>")
    tokenizer.chat_template = {"default": CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT, "tool_use": other}
    for options in ({}, {"chat_template": "tools_use"}):
        with pytest.raises(UserError, match="templates default, tool_use, so name one"):
            Chat(tokenizer, options)
    tokenizer.chat_template["default"] += "{# m.role == 'critic' #}"
    chat = Chat(tokenizer, {"chat_template": "tool_use"})
    with pytest.raises(MessagesRefused, match="names no role 'critic'"):
        chat.prompt([Message(role="critic", content="17")])
    answer = Message(role="tool", content="17")
    assert all("<result>" in chat.text(ids) for ids in (chat.prompt([*ASK, answer]), chat.delta([answer], chat.end_id)))


def test_an_option_that_the_chat_template_does_not_read_is_refused() -> None:
    tokenizer = tokenizer_of(CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT + "{% if enable_thinking %}<think>{% endif %}")
    assert Chat(tokenizer, {"enable_thinking": True}).plain("a").size
    with pytest.raises(UserError, match=r"chat_template_options: the chat template reads no 'enable_thinkin'"):
        Chat(tokenizer, {"enable_thinkin": False})


def test_the_delta_starts_with_the_end_only_where_the_response_has_none(chat: Chat) -> None:
    closed = chat.delta(TOLD, chat.end_id).tolist()
    other = int(chat.plain("fox")[0])
    assert chat.delta(TOLD, other).tolist() == [chat.end_id, *closed]
    assert chat.text(chat.delta(TOLD, other)) == "user 17 assistant"


def test_a_turn_ends_with_the_token_that_the_template_closes_it_with_or_the_tokenizers_own(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.eos_token = "<|pad|>"
    chat = Chat(tokenizer)
    assert chat.end_id == tokenizer.convert_tokens_to_ids(END)
    assert chat.end_ids == (chat.end_id, tokenizer.convert_tokens_to_ids("<|pad|>"))
    chat = templated(tmp_path, "{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    assert chat.end_ids == (chat.end_id,)
    assert chat.text(chat.delta(TOLD, chat.end_id)) == "17"


def test_a_folder_without_tokenizer_template_or_place_for_responses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="leaves out an assistant's message"):
        templated(tmp_path, "{{ messages[0]['content'] }}")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        load_tokenizer(tmp_path)
    beside_some = "{% for m in messages %}{% if messages[-1].role == 'user' %}{{ m.content }} {% endif %}{% endfor %}"
    chat = templated(tmp_path, beside_some)
    with pytest.raises(MessagesRefused, match="leaves out an assistant's message"):
        chat.delta([Message(role="system", content="17")], chat.end_id)


CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def byte_level_chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """A chat over a byte-level BPE tokenizer, as the models that people train have it."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT, "\n\n \n user assistant system"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT
    return Chat(tokenizer)


pieces = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=15),
    st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<|im_"]),
)
texts = st.lists(pieces, max_size=3).map("".join)
turns = st.lists(st.tuples(texts, st.sampled_from(["user", "tool"]), texts), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(question=texts, turns=turns)
@example(question="", turns=[("\n", "user", "")])
@example(question="", turns=[(".<|im_end|>", "user", "")])
def test_an_append_only_history_says_what_the_whole_conversation_says(
    byte_level_chat: Chat, question: str, turns: list[tuple[str, str, str]]
) -> None:
    chat = byte_level_chat
    messages = [Message(role="user", content=question)]
    history = chat.prompt(messages).tolist()
    for said, role, told in turns:
        response = chat.plain(said)
        assert shown(chat, response) == said.replace(BREAK, "")
        observation = Message(role=role, content=told)
        history += [*response.tolist(), chat.end_id, *chat.delta([observation], chat.end_id).tolist()]
        messages += [Message(role="assistant", content=said), observation]
    parts, rendered = between_ends(chat, history), between_ends(chat, chat.prompt(messages))
    assert [shown(chat, part) for part in parts] == [shown(chat, part) for part in rendered]
    for number, (part, again) in enumerate(zip(parts, rendered, strict=True)):
        # Responses keep the tokens that were sampled; tokenised anew they could join the text before them.
        if number not in range(2, len(parts) - 1, 2):
            assert part.tolist() == again.tolist()


def shown(chat: Chat, token_ids: Int32s) -> str:
    """The text without the characters that break special tokens."""
    return chat.text(token_ids).replace(BREAK, "")


def between_ends(chat: Chat, token_ids: Sequence[int] | Int32s) -> list[Int32s]:
    """What each turn closed: system, user, assistant, user or tool, assistant, ..., and the last generation prompt."""
    ids = np.asarray(token_ids, np.int32)
    return np.split(ids, np.flatnonzero(ids == chat.end_id))


def test_what_stands_between_two_turns_of_a_chatml_model_starts_after_its_end_token(byte_level_chat: Chat) -> None:
    delta = byte_level_chat.delta([Message(role="tool", content="17")], byte_level_chat.end_id)
    assert byte_level_chat.text(delta) == "\nuser\n<tool_response>\n17\n</tool_response>\nassistant\n"


def test_a_role_that_only_the_template_knows_is_left_to_it(tmp_path: Path) -> None:
    shown = "{{ m.content }}{% if m.type == 'robot' %}{% endif %}{% endfor %}"
    chat = templated(tmp_path, "{% for m in messages %}{% if m.role in ['tool', \"ipython\"] %}{% endif %}" + shown)
    assert chat.text(chat.prompt([Message(role="ipython", content="17")])) == "17"
    with pytest.raises(MessagesRefused, match="names no role 'robot'; use assistant"):
        chat.prompt([Message(role="robot", content="17")])


def test_what_a_template_reads_beside_role_and_content_is_not_taken_from_another_message(tmp_path: Path) -> None:
    chat = templated(tmp_path, "{% for m in messages %}{{ m.name }} {{ m.content }}{% endfor %}")
    prompts = [chat.prompt([{"role": "tool", "content": "17", "name": name}]) for name in ("fox", "owl")]  # type: ignore[typeddict-unknown-key]
    assert [chat.text(prompt) for prompt in prompts] == ["fox 17", "owl 17"]


# -- turns in the forms of published families --------------------------------------------------------------------------


def family(user: str, assistant: str, content: str = "m.content") -> str:
    """A template that writes these before a user's text and around an assistant's, and begins a reply."""
    before, after = assistant.split("|||")
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{before}{{{{ {content} }}}}{after}"
        f"{{% else %}}{user.replace('|||', '{{ m.content }}')}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}{{% endif %}}"
    )


CHATML = ("<|im_start|>user\n|||<|im_end|>\n", "<|im_start|>assistant\n|||<|im_end|>\n")
STABLE = {
    "qwen2, olmo3, smollm3": family(*CHATML),
    "gemma": family("<start_of_turn>user\n|||<end_of_turn>\n", "<start_of_turn>model\n|||<end_of_turn>\n"),
    "llama": family("<|start|>user<|stop|>\n\n|||<|eot|>", "<|start|>assistant<|stop|>\n\n|||<|eot|>"),
    "phi3": family("<|user|>\n|||<|end|>\n", "<|assistant|>\n|||<|end|>\n"),
    "granite": family("<|role|>user<|stop|>|||<|eot|>\n", "<|role|>assistant<|stop|>|||<|eot|>\n"),
    "glm4, whose turns end where the next begins": family("<|user|>\n|||", "<|assistant|>\n|||"),
    "mistral": family("[INST]|||[/INST]", "|||</s>"),
}
WITHOUT_EARLIER_THINKING = family(*CHATML, content="m.content.split('</think>')[-1]")
"""As Qwen3's."""
SPECIAL = ["<start_of_turn>", "<end_of_turn>", "<|start|>", "<|stop|>", "<|eot|>", "<|role|>"]
SPECIAL += ["<|user|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]"]


def histories(template: str) -> tuple[str, str]:
    """Two turns, appended to the tokens that were sampled, and rendered anew."""
    tokenizer: PreTrainedTokenizerBase = tokenizer_of(THINKING_AND_JSON)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    tokenizer.chat_template = template
    chat = Chat(tokenizer)
    asked, said, told = Message(role="user", content="2+2?"), "<think>sum</think>4", Message(role="user", content="+1?")
    appended = [*chat.prompt([asked]).tolist(), *chat.plain(said).tolist(), chat.end_id]
    appended += chat.delta([told], chat.end_id).tolist()
    rendered = chat.prompt([asked, Message(role="assistant", content=said), told]).tolist()
    return tokenizer.decode(appended), tokenizer.decode(rendered)


@pytest.mark.parametrize("name", STABLE)
def test_a_rendered_history_begins_with_what_was_sampled(name: str) -> None:
    appended, rendered = histories(STABLE[name])
    assert appended == rendered


def test_a_template_that_leaves_out_earlier_thinking_forks_only_where_it_is_rendered_again() -> None:
    appended, rendered = histories(WITHOUT_EARLIER_THINKING)
    assert appended.replace("<think>sum</think>", "") == rendered != appended


TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>a\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}IN<|im_end|>\n"
    "{% elif m.role == 'tool' %}TOOL{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
SHOWN = "<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
FAULTY = "{% if FAULT %}{{ raise_exception('no') }}{% endif %}"
BEFORE = "messages[loop.index0 - 1]"
NO_PLACE = TURNS.replace("IN", "")
RULES = {
    "any": (NO_PLACE.replace("TOOL", SHOWN), "called"),
    "an id": (NO_PLACE.replace("TOOL", FAULTY.replace("FAULT", "m.tool_call_id is not defined") + SHOWN), "called"),
    "nine characters": (
        NO_PLACE.replace("TOOL", FAULTY.replace("FAULT", "(m.tool_call_id or '') | length != 9") + SHOWN),
        "called",
    ),
    "a call": (
        NO_PLACE.replace(
            "TOOL", FAULTY.replace("FAULT", f"{BEFORE}.role != 'tool' and not {BEFORE}.tool_calls") + SHOWN
        ),
        "called",
    ),
    "no calls": (NO_PLACE.replace("TOOL", SHOWN).replace("m.tool_calls or []", "[]"), "alone"),
    "inside": (
        TURNS.replace("TOOL", "").replace(
            "IN",
            "{% if m.tool_calls %}{% for t in messages if t.role == 'tool' %}<t>{{ t.content }}{% endfor %}{% endif %}",
        ),
        "user",
    ),
    "refused": (NO_PLACE.replace("TOOL", FAULTY.replace("FAULT", "true")), "user"),
    "dropped": (NO_PLACE.replace("TOOL", ""), "user"),
}


@pytest.mark.parametrize("rule", RULES)
async def test_a_tools_answer_is_in_the_next_prompt_whatever_the_template_needs(rule: str) -> None:
    (tokenizer := tokenizer_of("")).chat_template, place = RULES[rule]
    chat = Chat(tokenizer)
    assert chat.tool_form.place == place
    tree = ConversationTree(chat, JsonCalls())
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = generated([*chat.plain('<tool_call>{"name": "f", "arguments": {"q": 1}}</tool_call>').tolist(), chat.end_id])
    first = tree.add(tree.open(ASK, tools), call, "first")
    told = [ASK[0], first.message(), {"role": "tool", "tool_call_id": first.ids[0], "content": "SEVENTEEN"}]
    opened = tree.open(told, tools)
    assert opened.how == "appended"
    prompts = [chat.text(opened.prompt_ids, True)]
    say = StepResult([Message(role="tool", content="SEVENTEEN")], 0.0, False)
    engine = ScriptedEngine(chat, lambda words: "4")
    await play(chat, engine, ScriptedEnvironment([say, say._replace(done=True)]), max_input_length=900)
    prompts.append(chat.text(np.array(engine.prompts[1], np.int32), True))
    bare = [*ASK, Message(role="assistant", content="4"), Message(role="tool", content="SEVENTEEN")]
    prompts.append(chat.text(chat.prompt(bare), True))
    for prompt in prompts:
        assert "SEVENTEEN" in prompt and prompt.count("<|im_end|><|im_end|>") == 0


GPT_OSS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.tool_calls %}<s>{{ m.tool_calls[0].function.name }}<s>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|tool|>"
    "{% else %}{% if m.role == 'assistant' %}<s>final{% endif %}<|user|>{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
THOUGHT = "<s>analysis<|user|>2+2<|im_end|><|im_start|>assistant"


@pytest.mark.parametrize(
    ("sampled", "text"),
    [
        (f"{THOUGHT}<s>final<|user|>4</s>", "<think>2+2</think>4"),
        ("<s>final<|user|>4</s>", "4"),
        ("4</s>", "4"),
        (THOUGHT, "<think>2+2"),
        ("<s>analysis<|user|>2+", "<think>2+"),
        (
            f'{THOUGHT} to=functions.add<s>json<|user|>{{"x": 2}}<|tool|>',
            '<think>2+2</think><tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>',
        ),
        (
            '<s>commentary to=functions.add<s>json<|user|>{"x": "</tool_call>"}<|tool|>',
            r'<tool_call>{"name": "add", "arguments": {"x": "<\/tool_call>"}}</tool_call>',
        ),
    ],
)
def test_the_text_of_a_turn_of_several_messages_has_no_headers(sampled: str, text: str) -> None:
    chat = Chat(tokenizer_of(GPT_OSS))
    assert chat.said(chat._special_tokens.encode(sampled)) == text


GLM = (
    "{% for m in messages %}<|{{ m.role if m.role != 'assistant' else 'im_start|><' }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><|>{% endif %}"
)


def test_a_turn_ends_where_the_familys_turn_ends_and_never_twice(tmp_path: Path) -> None:
    def ids(*tokens: str) -> list[int]:
        return [int(of) for of in tokenizer.convert_tokens_to_ids(list(tokens))]

    tokenizer = tokenizer_of(GPT_OSS)
    chat = Chat(tokenizer)
    assert list(chat.end_ids) == ids("</s>", "<|tool|>") and chat.end_id == ids("</s>")[0]
    for end in chat.end_ids:
        assert chat.text(chat.delta(TOLD, end), True).startswith("<|im_start|>user")
    assert chat.text(chat.delta([Message(role="tool", content="9")], chat.end_ids[1]), True).startswith(
        "<|im_start|>tool"
    )
    chat = Chat(tokenizer, ends=ids("<|im_end|>"))  # the model declares that the mark ends its turns
    assert chat.end_id == ids("<|im_end|>")[0]
    (tokenizer := tokenizer_of(GLM))
    chat = Chat(tokenizer)
    assert list(chat.end_ids) == ids("<|user|>", "</s>", "<|tool|>")
    assert with_end(generated([5], "length", sampled_end=False), chat).token_ids.tolist() == [5]
    talk = [*ASK, Message(role="assistant", content="4"), *TOLD, Message(role="assistant", content="5")]
    (row,) = rows_with_loss_mask(chat, "append", [talk])
    assert chat.text(row.token_ids[row.loss_mask], True) == "4<|user|>5<|user|>"
    assert chat.text(row.token_ids, True).count("<|user|>") == 3
    make_tokenizer(tmp_path, lookup.vocabulary())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 0]}')
    assert load_chat(tmp_path, GeneratorConfig()).end_ids[-2:] == (3, 0)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [0, 3], "vocab_size": 99}}')
    assert load_chat(tmp_path, GeneratorConfig()).end_ids[-2:] == (0, 3), "without the other file"


def test_the_header_of_an_answer_is_known_also_where_decoding_puts_spaces_between_tokens() -> None:
    words = ["<|return|>", "<|start|>", "<|message|>", "<|end|>", "user", "assistant", "final", "fox", "?"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:4]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|return|>", unk_token="?")
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %} final{% endif %}<|message|>"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    chat = Chat(tokenizer)
    assert chat.text(chat.answer("fox"), True) == "final <|message|> fox" and chat.said(chat.answer("fox")) == "fox"


def test_a_declared_end_that_the_tokenizer_lacks_is_not_looked_for_in_texts() -> None:
    call = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }} None of these{% endfor %}"
    tokenizer = tokenizer_of(
        "{% for m in messages %}<|im_start|>{{ m.role }} " + call + "{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    chat = Chat(tokenizer, ends=[99999])
    told = chat.text(chat.delta([Message(role="tool", content="17")], chat.end_id), True)
    assert told == "<|im_start|>tool 17<|im_end|><|im_start|>assistant "


def test_an_end_that_the_folder_does_not_declare_is_a_note_because_other_engines_would_not_stop_there() -> None:
    (tokenizer := tokenizer_of(CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT)).eos_token = "</s>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert Chat(tokenizer, ends=[end]).notes(has_tools=False) == []
    (note,) = Chat(tokenizer).notes(has_tools=False)
    assert note.startswith("turns end with <|im_end|>, but the folder names it in no eos_token_id")
