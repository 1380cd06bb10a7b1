"""An agent of each library, as its users write it: `recipe_program.py LIBRARY URL KEY` prints its answer as JSON.

Runs in an environment that holds only that library, which brings pydantic, so it imports nothing of this project. Every
agent answers one question, with a tool that says 17.
"""

import asyncio
import json
import sys

from pydantic import BaseModel

library, url, key = sys.argv[1:]
QUESTION = "how old is the fox?"


class Age(BaseModel):
    """The age."""

    age: int


def search(query: str) -> str:
    """Look up.

    Args:
        query: what to look up
    """
    return "17"


def openai_agents():
    from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_default_openai_client(AsyncOpenAI(base_url=url, api_key=key))
    set_tracing_disabled(True)
    agent = Agent(
        name="keeper", instructions="be brief", model="policy", tools=[function_tool(search)], output_type=Age
    )
    return Runner.run_sync(agent, QUESTION).final_output.age


def langgraph():
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", base_url=url, api_key=key)
    agent = create_agent(model, [search], system_prompt="be brief", response_format=Age)
    return agent.invoke({"messages": [("user", QUESTION)]})["structured_response"].age


def pydantic_ai():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=url, api_key=key))
    agent = Agent(model, instructions="be brief", output_type=Age)
    agent.tool_plain(search)
    return agent.run_sync(QUESTION).output.age


def dspy():
    import dspy

    dspy.configure(lm=dspy.LM("openai/policy", api_base=url, api_key=key, cache=False))
    query = dspy.Predict("question -> query")(question=QUESTION).query
    facts = dspy.ChainOfThought("query -> facts")(query=query).facts
    return int(dspy.Predict("facts, question -> answer: int")(facts=facts, question=QUESTION).answer)


def smolagents():
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id="policy", api_base=url, api_key=key)
    return ToolCallingAgent(tools=[tool(search)], model=model, verbosity_level=0).run(QUESTION)


def strands():
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": url, "api_key": key}, model_id="policy")
    agent = Agent(model=model, tools=[tool(search)], system_prompt="be brief", callback_handler=None)
    return agent(QUESTION, structured_output_model=Age).structured_output.age


def litellm():
    import litellm

    tool = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}
    asked = [{"role": "user", "content": QUESTION}]
    given = {"model": "openai/policy", "api_base": url, "api_key": key}
    given["tools"] = [{"type": "function", "function": tool}]
    message = litellm.completion(messages=asked, temperature=0.1, **given).choices[0].message
    asked += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "17"}]
    return int(litellm.completion(messages=asked, **given).choices[0].message.content)


def autogen():
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    can = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    about = {**can, "family": "unknown"}
    model = OpenAIChatCompletionClient(model="policy", base_url=url, api_key=key, model_info=about)
    agent = AssistantAgent("keeper", model_client=model, tools=[search], reflect_on_tool_use=True)
    return int(asyncio.run(agent.run(task=QUESTION)).messages[-1].content)


def anthropic():
    import anthropic

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key)
    asked = {"model": "policy", "max_tokens": 500, "messages": [{"role": "user", "content": QUESTION}]}
    asked["tools"] = [anthropic.beta_tool(search)]
    runs = [client.beta.messages.tool_runner(stream=stream, **asked) for stream in (False, True)]
    (said,) = {run.until_done().content[0].text for run in runs}
    return int(said)


print(json.dumps(globals()[library]()))
