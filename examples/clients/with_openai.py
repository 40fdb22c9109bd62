"""Test OpenAI's package: chats, streams, tools, schemas, log-probabilities. python with_openai.py URL MODEL"""

import json
import sys

import openai
import pydantic

url, model = sys.argv[1:]
api = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
messages = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Who are you?"}]


class Person(pydantic.BaseModel):
    """A person whom the text describes."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


# %% The same chat, as one answer and as a stream.
chat = {"model": model, "messages": messages, "temperature": 0, "max_completion_tokens": 16}
whole = api.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
pieces = [event.choices[0].delta.content or "" for event in api.chat.completions.create(**chat, stream=True)]
assert whole.choices[0].message.content == "".join(pieces) and whole.usage.prompt_tokens_details.cached_tokens >= 0
assert all(len(token.top_logprobs) == 2 for token in whole.choices[0].logprobs.content)

# %% A second turn: the answer is sent back unchanged.
again = [*messages, whole.choices[0].message, {"role": "user", "content": "And now?"}]
assert api.chat.completions.create(**{**chat, "messages": again}).choices[0].finish_reason in ("length", "stop")

# %% An answer in the form of a JSON schema, and a function call.
form = {"type": "json_schema", "json_schema": {"name": "pick", "schema": {"enum": ["red", "blue"]}}}
assert api.chat.completions.create(**chat, response_format=form).choices[0].message.content in ('"red"', '"blue"')
tools = [openai.pydantic_function_tool(Person, name="greet")]
forced = {"type": "function", "function": {"name": "greet"}}
call = api.chat.completions.create(**{**chat, "max_completion_tokens": 200}, tools=tools, tool_choice=forced)
assert set(json.loads(call.choices[0].message.tool_calls[0].function.arguments)) == {"name", "age"}

# %% The same with OpenAI's Responses API.
asked = {"model": model, "input": "Who are you?", "max_output_tokens": 16, "temperature": 0}
response = api.responses.create(**asked, include=["reasoning.encrypted_content"])
*_, last = api.responses.create(**asked, stream=True)
assert last.type == "response.incomplete" and last.response.output_text == response.output_text
print("openai: ok")
