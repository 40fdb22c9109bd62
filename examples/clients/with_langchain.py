"""Test LangChain: messages, streams, a schema, and a tool that must be called. python with_langchain.py URL MODEL"""

import sys
from typing import Annotated

import pydantic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
llm = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=200, max_retries=0)
messages = [SystemMessage("Be short."), HumanMessage("Who are you?")]


class Person(pydantic.BaseModel):
    """A person whom the text describes."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


Digit = Annotated[int, pydantic.Field(ge=0, le=9)]


@tool
def add(a: Digit, b: Digit) -> int:
    """Add two numbers."""
    return a + b


said = llm.invoke(messages)
assert said.content == "".join(chunk.content for chunk in llm.stream(messages))
assert llm.invoke([*messages, said, HumanMessage("And now?")]).usage_metadata["input_tokens"] > 0
assert isinstance(llm.with_structured_output(Person, method="function_calling").invoke(messages), Person)
(call,) = llm.bind_tools([add], tool_choice="add", parallel_tool_calls=False).invoke(messages).tool_calls
assert call["name"] == "add" and set(call["args"]) == {"a", "b"}
print("langchain: ok")
