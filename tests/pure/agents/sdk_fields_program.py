"""Prints the fields of Anthropic's requests, stable and beta, as JSON; runs where only that SDK is installed."""

import json
from typing import get_type_hints

from anthropic.types import message_create_params as stable
from anthropic.types.beta import message_create_params as beta

hints = [get_type_hints(module.MessageCreateParamsBase) for module in (stable, beta)]
print(json.dumps(sorted({name for of in hints for name in of} | {"stream", "output_format"})))
