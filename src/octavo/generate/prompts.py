"""Token ids of the prompts that are continued, and of those with a gap to fill."""

from __future__ import annotations

from octavo.errors import InvalidValue, RequestError
from octavo.generate.lengths import check_texts
from octavo.generate.model import ServedModel
from octavo.generate.request import GenerationRequest, Infill
from octavo.text.infill import InfillTokens, infill_tokens


def encode_prompts(request: GenerationRequest, model: ServedModel) -> list[list[int]]:
    """Ids of each of a request's prompts. Raises RequestError."""
    if request.infill is not None:
        return [_around(prompt, request.infill, model) for prompt in request.prompts]
    if request.parse_special:
        return [_parsed(prompt, model) for prompt in request.prompts]
    texts, encode = (p for p in request.prompts if isinstance(p, str)), model.tokenizer.encode
    check_texts(texts, model, "prompts")
    return [encode(p) if isinstance(p, str) else p for p in request.prompts]  # type: ignore[misc]


def _around(prompt: object, infill: Infill, model: ServedModel) -> list[int]:
    tokens = filling(model)
    if not isinstance(prompt, str):
        raise InvalidValue("prompts before a gap are texts", "prompts")
    texts = (infill.suffix, *(part for file in infill.files for part in file))
    check_texts([prompt], model, "prompts")
    check_texts(texts, model, "infill")
    return tokens.encode(model.tokenizer, prompt, infill.suffix, infill.files)


def filling(model: ServedModel) -> InfillTokens:
    """The tokens of a model that fills in the middle. Raises RequestError."""
    if (tokens := infill_tokens(model.tokenizer)) is None:
        raise RequestError(
            f"infill: {model.name} has no tokens for filling in the middle",
            "infill",
            "unsupported_task",
        )
    return tokens


def _parsed(prompt: str | list[int] | list[int | str], model: ServedModel) -> list[int]:
    """Ids of a prompt whose texts may name control tokens. It begins with bos where the model wants
    it, whether it says so or not."""
    tokenizer, ids = model.tokenizer, list[int]()
    pieces = [prompt] if isinstance(prompt, str) else prompt
    for piece in pieces:
        if isinstance(piece, str):
            check_texts([tokenizer.without_control(piece)], model, "prompts")
            ids += tokenizer.encode_rendered(piece)
        else:
            ids.append(piece)
    bos = tokenizer.special.bos
    text = isinstance(pieces[0], str) if pieces else False
    if text and tokenizer.special.add_bos and bos is not None and ids[:1] != [bos]:
        return [bos, *ids]
    return ids
