"""Test Instructor: objects by tools, by JSON mode, and by JSON schemas. python with_instructor.py URL MODEL"""

import sys

import instructor
import openai
import pydantic

url, model = sys.argv[1:]


class Person(pydantic.BaseModel):
    """A person whom the text describes."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    api = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    asked = {"model": model, "messages": [{"role": "user", "content": "Anna is 7."}], "max_tokens": 200}
    found = api.chat.completions.create(response_model=Person, max_retries=0, temperature=0, **asked)
    assert isinstance(found, Person) and 0 <= found.age <= 150, mode
print("instructor: ok")
