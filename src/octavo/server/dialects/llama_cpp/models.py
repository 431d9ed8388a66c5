"""What llama.cpp's API tells of a model, and a conversation as its template writes it."""

from __future__ import annotations

import msgspec

from octavo import __version__
from octavo.engine.plan import SEQUENCES
from octavo.generate.model import ServedModel
from octavo.generate.prepare import render_chat
from octavo.server.dialects.llama_cpp.responses import settings
from octavo.server.dialects.openai.requests import conversation_request
from octavo.server.dialects.openai.schemas import ConversationBody

encode = msgspec.json.Encoder().encode


def apply_template(body: ConversationBody, served: ServedModel) -> bytes:
    """The prompt that `/completion` would have to be given. Raises RequestError."""
    return encode({"prompt": render_chat(conversation_request(body), served).plain})


def props(served: ServedModel) -> bytes:
    """A model's properties. Where its files lie is not told."""
    special, name = served.tokenizer.special, served.tokenizer.name
    defaults = {"params": settings(served.defaults), "n_ctx": served.context}
    return encode(
        {
            "default_generation_settings": defaults,
            "total_slots": SEQUENCES,
            "model_alias": served.name,
            "model_path": served.name,
            "chat_template": "" if served.template is None else served.template.source,
            "modalities": {"vision": served.images is not None, "audio": False},
            "bos_token": "" if special.bos is None else name(special.bos),
            "eos_token": "" if special.end is None else name(special.end),
            "build_info": f"octavo {__version__}",
            "is_sleeping": False,
        }
    )


def slots(served: ServedModel) -> bytes:
    """The places of a batch: as many are taken as requests run. Which has which is not told."""
    running = served.client.stats.get("running", 0)
    return encode(
        [
            {"id": i, "n_ctx": served.context, "speculative": False, "is_processing": i < running}
            for i in range(SEQUENCES)
        ]
    )
