"""What the server's own endpoints answer with, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class Live(TypedDict):
    status: Literal["live"]


class Health(TypedDict):
    status: Literal["ready", "draining", "not ready"]
    models: dict[str, int]


class Version(TypedDict):
    version: str


class Loaded(TypedDict):
    model: str
    state: Literal["unloaded", "loading", "ready", "unavailable"]
    pinned: bool


class Adapter(TypedDict):
    status: Literal["loaded", "unloaded"]
    model: str


class Page(TypedDict):
    object: Literal["list"]
    has_more: bool
    first_id: str | None
    last_id: str | None


class File(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    expires_at: None


class Files(Page):
    data: list[File]


class Deleted(TypedDict):
    id: str
    object: str
    deleted: bool


class Fault(TypedDict):
    code: str
    line: int
    message: str
    param: None


class Faults(TypedDict):
    object: Literal["list"]
    data: list[Fault]


class Counts(TypedDict):
    total: int
    completed: int
    failed: int


class Batch(TypedDict):
    id: str
    object: Literal["batch"]
    status: Literal["validating", "in_progress", "completed", "failed", "cancelled"]
    endpoint: str
    input_file_id: str
    completion_window: Literal["24h"]
    created_at: int
    errors: Faults | None
    expires_at: int
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str]


class Batches(Page):
    data: list[Batch]


class Items(Page):
    data: list[dict[str, Any]]


class Replica(TypedDict):
    model: str
    replica: str
    state: Literal["up", "draining", "down"]
    pid: int | None
    running: int
    waiting: int
    restarts: int


class Replicas(TypedDict):
    object: Literal["list"]
    data: list[Replica]


class Routes(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
