"""Turns in the forms of published families: appended history against a rendered one."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from service.rollout.chat.chat import Chat
from service.rollout.environment import Message
from tests.pure.rollout.test_special_tokens import THINKING_AND_JSON, tokenizer_of


def turns(user: str, assistant: str, content: str = "m.content") -> str:
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
    "qwen2, olmo3, smollm3": turns(*CHATML),
    "gemma": turns("<start_of_turn>user\n|||<end_of_turn>\n", "<start_of_turn>model\n|||<end_of_turn>\n"),
    "llama": turns("<|start|>user<|stop|>\n\n|||<|eot|>", "<|start|>assistant<|stop|>\n\n|||<|eot|>"),
    "phi3": turns("<|user|>\n|||<|end|>\n", "<|assistant|>\n|||<|end|>\n"),
    "granite": turns("<|role|>user<|stop|>|||<|eot|>\n", "<|role|>assistant<|stop|>|||<|eot|>\n"),
    "glm4, whose turns end where the next begins": turns("<|user|>\n|||", "<|assistant|>\n|||"),
    "mistral": turns("[INST]|||[/INST]", "|||</s>"),
}
WITHOUT_EARLIER_THINKING = turns(*CHATML, content="m.content.split('</think>')[-1]")
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


@pytest.mark.parametrize("family", STABLE)
def test_a_rendered_history_begins_with_what_was_sampled(family: str) -> None:
    appended, rendered = histories(STABLE[family])
    assert appended == rendered


def test_a_template_that_leaves_out_earlier_thinking_forks_only_where_it_is_rendered_again() -> None:
    appended, rendered = histories(WITHOUT_EARLIER_THINKING)
    assert appended.replace("<think>sum</think>", "") == rendered != appended
