"""Prints the fields of the requests of an SDK, `openai` or `anthropic`, as JSON; runs where only that SDK is installed.

openai: chat completions, Responses. anthropic: Messages, stable and beta together.
"""

import json
import sys
from typing import get_type_hints


def openai():
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses

    return [[*get_type_hints(of), "stream"] for of in (Chat, Responses)]


def anthropic():
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase as Beta
    from anthropic.types.message_create_params import MessageCreateParamsBase as Stable

    return [[*get_type_hints(Stable), *get_type_hints(Beta), "stream", "output_format"]]


print(json.dumps(globals()[sys.argv[1]]()))
