"""The Anthropic SDK: `anthropic_program.py URL KEY create|stream CONVERSATION` plays a conversation, prints replies.

Runs in an environment that holds only that SDK, so it imports nothing of this project.
"""

import json
import sys

import anthropic

url, key, kind, given = sys.argv[1:]
asked = json.loads(given)
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
messages = [{"role": "user", "content": asked["question"]}]
heard = []
for answers in asked["turns"]:
    request = {
        "model": "policy",
        "max_tokens": 2048,
        "messages": messages,
        "tools": asked["tools"],
        "system": [{"type": "text", "text": asked["system"], "cache_control": {"type": "ephemeral"}}],
    }
    if kind == "stream":
        with client.messages.stream(thinking={"type": "enabled", "budget_tokens": 1024}, **request) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**request)
    calls = [block for block in message.content if block.type == "tool_use"]
    text = "".join(block.text for block in message.content if block.type == "text")
    thinking = "".join(block.thinking for block in message.content if block.type == "thinking")
    heard.append([text, thinking, [[call.name, call.input] for call in calls]])
    messages.append(
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
    )
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": said}]}
        for call, said in zip(calls, answers, strict=False)
    ]
    messages.append({"role": "user", "content": results or answers[0]})
counted = client.messages.count_tokens(model="policy", messages=messages[:1]).input_tokens
try:
    client.messages.create(
        model="policy", max_tokens=5, messages=messages[:1], extra_body={"thread": {"type": "create"}}
    )
except anthropic.BadRequestError as error:
    print(json.dumps({"heard": heard, "counted": counted, "refused": str(error)}))
