"""Images of requests: which are encoded, which are next, and what is kept of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.backends.base import Floats, Ints
from octavo.engine.encoder import ImageEncoder
from octavo.engine.kv import ImageRange, KVState
from octavo.engine.request import Request
from octavo.vision.image import ImageInput


@dataclass(eq=False, slots=True)
class PlacedImage:
    """An image of a prompt, at tokens [start, end). position: of the first of them, for rotations;
    places: where they are from there on along each axis, None for one after the other; advance: how
    much further on what follows is. salt: of its request. embeddings: while they are held for it.
    waits: they are needed now, and not there; needed: they have been, whether they were or not."""

    image: ImageInput
    start: int
    position: int
    places: Ints | None
    advance: int
    mutual: bool
    salt: str = ""
    embeddings: Floats | None = None
    waits: bool = False
    needed: bool = False

    @property
    def end(self) -> int:
        return self.start + self.image.tokens

    @property
    def key(self) -> bytes:
        """What its embeddings are kept by: its content, for requests of the same salt alone, so
        that nobody sees in the time an answer takes what others have shown."""
        return self.image.digest + self.salt.encode()

    @property
    def range(self) -> ImageRange:
        """Where it is, and what the prefix index knows its tokens by."""
        return ImageRange(self.start, self.end, self.image.key)

    @property
    def shift(self) -> int:
        """How much the position of a token after it is above its number."""
        return self.position + self.advance - self.end

    def coordinates(self, first: int, last: int) -> Ints | None:
        """Of tokens [first, last) of the prompt, along each axis; None if they are positions."""
        if self.places is None:
            return None
        return self.position + self.places[:, first - self.start : last - self.start]

    def fork(self) -> PlacedImage:
        """A copy that holds nothing."""
        return replace(self, embeddings=None, waits=False)


def rotary_positions(images: Sequence[PlacedImage], start: int, count: int) -> list[int]:
    """Where tokens [start, start + count) of a prompt with these images are, for rotations."""
    at = list(range(start, start + count))
    for image in images:
        if image.end < start + count:
            first = max(image.end, start)
            at[first - start :] = range(first + image.shift, start + count + image.shift)
    return at


class EncoderCache:
    """Embeddings by the key of their image, at most `capacity` bytes; those that nobody holds go
    first the least recently used."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0  # what is reserved included
        self._entries: OrderedDict[bytes, Floats] = OrderedDict()
        self._users: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def acquire(self, key: bytes) -> Floats | None:
        """An image's embeddings, which stay until `release`; None if they are not here."""
        if (found := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            self._users[key] = self._users.get(key, 0) + 1
        return found

    def release(self, key: bytes) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]

    def reserve(self, size: int) -> bool:
        """Makes room for `size` bytes to come. Returns False, evicting nothing, if what is held
        leaves too little."""
        idle = [key for key in self._entries if key not in self._users]
        if self.used - sum(self._entries[key].nbytes for key in idle) + size > self.capacity:
            return False
        for key in idle:
            if self.used + size <= self.capacity:
                break
            self.used -= self._entries.pop(key).nbytes
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        """Ends a reservation that nothing has come of."""
        self.used -= size

    def put(self, key: bytes, embeddings: Floats) -> None:
        """Keeps embeddings, for which there is a reservation."""
        self._entries[key] = embeddings


class ImageQueue:
    """What an engine does with images. capacity: bytes of embeddings that are kept.

    A sequence holds the embeddings of images that it has yet to compute, in their order as far as
    they are there: so whatever is held can be computed, and room comes free.
    """

    def __init__(self, encoder: ImageEncoder, capacity: int) -> None:
        self.encoder = encoder
        self.cache = EncoderCache(capacity)
        self.encoded = self.hits = self.microseconds = 0
        self._batch: dict[bytes, ImageInput] = {}  # begun, by key
        self._alone: set[bytes] = set()  # of batches that failed

    def place(self, request: Request) -> tuple[PlacedImage, ...]:
        """The images of a request, which has been checked."""
        vision, shift, out = self.encoder.vision, 0, []
        for image, start in zip(request.images, request.image_offsets, strict=True):
            layout = vision.layout(image)
            placed = PlacedImage(
                image, start, start + shift, layout.places, layout.advance, vision.mutual,
                request.salt,
            )  # fmt: skip
            shift = placed.shift
            out.append(placed)
        return tuple(out)

    def share(self, kv: KVState, images: Sequence[PlacedImage], count: int, most: int) -> int:
        """How many of the next `count` tokens can be computed: those before an image that is not
        encoded. Tokens of an image that see each other are computed together; if these come next,
        all of them are, though they be more than `count`, up to `most`."""
        end = kv.computed + count
        for placed in images:
            if placed.end <= kv.computed:
                self._let_go(placed)
            elif placed.start >= end:
                break
            elif not self._hold(placed):
                end = max(placed.start, kv.computed)
                break
            elif placed.mutual and placed.end > end:
                next_to_come = placed.start <= kv.computed
                whole = next_to_come and placed.end - kv.computed <= most
                end = placed.end if whole else max(placed.start, kv.computed)
                break
        return end - kv.computed

    def release(self, images: Iterable[PlacedImage]) -> None:
        """Ends what a sequence holds."""
        for placed in images:
            self._let_go(placed)

    def _hold(self, placed: PlacedImage) -> bool:
        if placed.embeddings is None:
            placed.embeddings = self.cache.acquire(placed.key)
            placed.waits = placed.embeddings is None
            self.hits += not (placed.waits or placed.needed)
            placed.needed = True
        return placed.embeddings is not None

    def _let_go(self, placed: PlacedImage) -> None:
        placed.waits = False
        if placed.embeddings is not None:
            placed.embeddings = None
            self.cache.release(placed.key)

    @property
    def counts(self) -> dict[str, int]:
        """Fields of EngineStats."""
        return {
            "images_encoded": self.encoded, "image_hits": self.hits,
            "image_us": self.microseconds, "image_bytes": self.cache.used,
        }  # fmt: skip

    # -- encoding -----------------------------------------------------------------------------

    def encode(
        self, wanted: Iterable[PlacedImage], seconds: float,
        begun: Callable[[PlacedImage, int], None] = lambda *_: None,
    ) -> dict[bytes, Exception]:  # fmt: skip
        """Encodes for about so long what is under way, else the first of `wanted`. Gives what
        failed. begun: told of each image that is begun, and its rows."""
        began = time.perf_counter()
        try:
            if not self._batch and not self._begin(wanted, begun):
                return {}
            found = self.encoder.run(seconds)
        except Exception as e:
            return self._failed(e)
        finally:
            self.microseconds += int(1e6 * (time.perf_counter() - began))
        if found is not None:
            for key, embeddings in zip(self._batch, found, strict=True):
                self.cache.put(key, embeddings)
            self.encoded += len(self._batch)
            self._batch = {}
        return {}

    def abandon(self) -> None:
        """Drops the images that are under way."""
        if self._batch:
            self._give_back(self._batch.values())
            self._batch = {}
            self.encoder.stop()

    def _give_back(self, images: Iterable[ImageInput]) -> None:
        self.cache.give_back(sum(map(self.encoder.bytes, images)))

    def encodes(self, images: Iterable[PlacedImage]) -> bool:
        """Whether one of these is under way."""
        return bool(self._batch) and any(i.key in self._batch for i in images)

    def _begin(
        self, wanted: Iterable[PlacedImage], begun: Callable[[PlacedImage, int], None]
    ) -> bool:
        """Begins the next images, as many as one run takes and the cache has room for."""
        for key, placed in self._missing(wanted).items():
            alone = key in self._alone
            if self._batch and alone:
                break
            if not self.encoder.takes([*self._batch.values(), placed.image]):
                break
            if not self.cache.reserve(self.encoder.bytes(placed.image)):
                break
            self._batch[key] = placed.image
            begun(placed, self.encoder.vision.layout(placed.image).rows)
            if alone:
                break
        if self._batch:
            self.encoder.begin(list(self._batch.values()))
        return bool(self._batch)

    def _missing(self, wanted: Iterable[PlacedImage]) -> dict[bytes, PlacedImage]:
        """Those that are not here, in their order."""
        missing: dict[bytes, PlacedImage] = {}
        for placed in wanted:
            if placed.key not in self.cache:
                missing.setdefault(placed.key, placed)
        return missing

    def _failed(self, error: Exception) -> dict[bytes, Exception]:
        """After a run that failed: one image at a time; the one that fails alone has failed."""
        images, self._batch = self._batch, {}
        if not images:
            raise error
        self._give_back(images.values())
        batch = list(images)
        self._alone = set(batch) if len(batch) > 1 else set()
        return {batch[0]: error} if len(batch) == 1 else {}
