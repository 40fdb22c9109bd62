"""The longest text that is worth tokenising: one that cannot fit the model is refused before."""

from __future__ import annotations

from fastdecode.core.errors import RequestError

LONG_TEXT_BYTES = 1 << 16
"""A text beyond it takes a tokenizer long enough that short ones should not wait for it."""


def check_can_fit(text: str, max_bytes_per_token: int | None, max_model_len: int) -> None:
    """RequestError, without tokenising it, for a text that has too many bytes for ``max_model_len`` tokens.

    ``max_bytes_per_token``: UTF-8 bytes; nothing is refused where it is None, for a tokenizer without a bound.
    """
    num_bytes = len(text.encode(errors="surrogatepass"))
    if num_bytes <= max_model_len or max_bytes_per_token is None:
        return
    most = max_model_len * max_bytes_per_token
    if num_bytes > most:
        raise RequestError(
            f"prompt has {num_bytes} bytes of text, and max_model_len is {max_model_len} tokens of at most "
            f"{max_bytes_per_token} bytes each: a text over {most} bytes cannot fit"
        )
