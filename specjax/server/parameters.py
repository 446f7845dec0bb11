"""What clients may send, with limits on every size. Unknown fields are ignored, unless they would change the output."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_PROMPTS = 256  # prompts of one request
MAX_CHOICES = 256  # prompts times n
MAX_STOPS = 16
MAX_LISTED = 1024  # entries of logit_bias
MAX_MESSAGES = 4096

# Fields that would change the output and that no model here supports, with the values that change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "suffix": ("",), "best_of": (), "use_beam_search": (False,),
    "length_penalty": (1, 1.0), "early_stopping": (False,), "modalities": (["text"],), "audio": (),
    "web_search_options": (), "reasoning_effort": ("none",), "verbosity": ("medium",), "bad_words": ([],),
    "prompt_logprobs": (), "prompt_embeds": (), "skip_special_tokens": (True,), "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,), "logits_processors": ([],), "chat_template": (), "documents": ([],),
    "continue_final_message": (False,), "add_special_tokens": (), "typical_p": (1, 1.0), "lora": (), "n_predict": (),
}  # fmt: skip

Count = Annotated[int, Field(ge=0, le=1 << 30)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class Body(BaseModel):
    """A request's JSON object. Numbers in strings are no numbers."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool | None = None


class Sampling(Body):
    """The fields that completions and chat completions share. A field that is null counts as absent."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None
    min_p: Number | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_LISTED)] | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    return_origins: bool | None = None

    @model_validator(mode="after")
    def _supported(self) -> "Sampling":
        for name, value in (self.model_extra or {}).items():
            harmless = name == "best_of" and value == (self.n or 1)
            if name in REFUSED and value is not None and value not in REFUSED[name] and not harmless:
                raise ValueError(f"{name} is not supported by this server; leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream = true")
        for token in self.logit_bias or {}:
            if not (token.isascii() and token.isdigit() and len(token) <= 10):
                raise ValueError("logit_bias must have token ids as keys")
        return self


Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(Sampling):
    """The body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: Annotated[str, Field(max_length=64)]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = None

    @model_validator(mode="after")
    def _is_text(self) -> "Message":
        for name in ("tool_calls", "function_call", "audio"):
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} is not supported by this server: messages are text")
        return self

    def plain(self) -> dict[str, str]:
        """The message as a chat template reads it. Text parts are joined by line breaks."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        name = (self.model_extra or {}).get("name")
        return {"role": self.role, "content": text, **({"name": name} if isinstance(name, str) else {})}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(Sampling):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if (self.model_extra or {}).get("echo"):
            raise ValueError("echo is not supported for chats")
        if {"messages", "tools"} & set(self.chat_template_kwargs or {}):
            raise ValueError("chat_template_kwargs must not hold messages or tools")
        return self


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be given, and not both")
        return self


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
