"""Test LlamaIndex: completions, chats, streams, and a structured answer. python with_llama_index.py URL MODEL"""

import sys

import pydantic
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
settings = {"context_window": 2048, "max_tokens": 100, "temperature": 0, "max_retries": 0}
llm = OpenAILike(
    model=model, api_base=url, api_key="none", is_function_calling_model=True, is_chat_model=True, **settings
)


class Person(pydantic.BaseModel):
    """A person whom the text describes."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


messages = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content="Who are you?")]
said = llm.chat(messages).message.content
assert said == list(llm.stream_chat(messages))[-1].message.content
plain = OpenAILike(model=model, api_base=url, api_key="none", is_chat_model=False, **settings)
assert plain.complete("def f(").text == list(plain.stream_complete("def f("))[-1].text
assert isinstance(llm.structured_predict(Person, PromptTemplate("Who are you?")), Person)
print("llama-index: ok")
