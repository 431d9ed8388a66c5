"""What a constraint does to answers: facts told in prose, wanted as JSON of a schema.

    python benchmarks/structured.py smollm2

A hundred schemas in ten domains; the prompt names no key. Prints how many answers are valid and
complete, how many of the facts are right, how many answers consist of the tokens that the
tokenizer would have written them in, and how likely the model itself holds them to be (nats a byte,
without the constraint). Greedy, so a model's figures are the same in every run.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from typing import Any

import jsonschema

from octavo import LLM, SamplingParams
from octavo.text import grammar

TEXT, COUNT = {"type": "string", "maxLength": 40}, {"type": "integer"}
PRICE, YES = {"type": "number"}, {"type": "boolean"}


@dataclass(frozen=True)
class Fact:
    """A key, its schema, how it is told, and the values it may have."""

    key: str
    schema: dict[str, Any]
    told: str
    values: list[Any]


def _choice(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


NAMES = ["Alice Johnson", "Marco Rossi", "Priya Patel", "Tom Becker", "Sofia Lopez", "Ken Tanaka"]
CITIES = ["Paris", "Berlin", "Madrid", "Oslo", "Toronto", "Lisbon"]
FOODS = ["tomato soup", "apple pie", "chicken curry", "rice pudding", "lentil salad"]
DOMAINS: dict[str, list[Fact]] = {
    "contact": [
        Fact("full_name", TEXT, "This is {}.", NAMES), Fact("years_old", COUNT, "Age: {}.", [25, 31, 47, 62]),
        Fact("home_city", TEXT, "Lives in {}.", CITIES), Fact("occupation", TEXT, "Works as a {}.", ["nurse", "teacher", "pilot", "baker"]),
        Fact("newsletter_opt_in", YES, "Wants our newsletter: {}.", [True, False]),
    ],
    "invoice": [
        Fact("invoice_number", TEXT, "Bill {}.", ["A-1001", "B-2040", "C-7730"]), Fact("customer", TEXT, "Sent to {}.", NAMES),
        Fact("amount_due", PRICE, "To be paid: {} dollars.", [120, 75, 990, 43]), Fact("quantity", COUNT, "{} items.", [2, 5, 12]),
        Fact("payment_status", _choice("paid", "unpaid", "overdue"), "It is {}.", ["paid", "unpaid", "overdue"]),
    ],
    "recipe": [
        Fact("dish", TEXT, "How to make {}.", FOODS), Fact("servings", COUNT, "Enough for {} people.", [2, 4, 6]),
        Fact("cooking_minutes", COUNT, "Ready after {} minutes.", [20, 35, 90]), Fact("main_ingredient", TEXT, "You mostly need {}.", ["tomatoes", "apples", "chicken", "rice"]),
        Fact("difficulty", _choice("easy", "medium", "hard"), "It is {} to do.", ["easy", "medium", "hard"]),
    ],
    "event": [
        Fact("event_title", TEXT, "Join us for {}.", ["Jazz Night", "Book Fair", "Spring Market", "Chess Open"]), Fact("venue", TEXT, "Held at {}.", ["Town Hall", "Grand Hotel", "City Park"]),
        Fact("attendees_expected", COUNT, "{} people will come.", [50, 120, 300]), Fact("organizer", TEXT, "Ask {} for details.", NAMES),
        Fact("weekday", _choice("Monday", "Friday", "Sunday"), "On {}.", ["Monday", "Friday", "Sunday"]),
    ],
    "joke": [
        Fact("setup", TEXT, "It begins: {}", ["Why did the chicken cross the road?", "What is brown and sticky?"]),
        Fact("punchline", TEXT, "And it ends: {}", ["To get to the other side.", "A stick."]), Fact("comedian", TEXT, "Told by {}.", NAMES),
        Fact("laughs", COUNT, "{} people laughed.", [3, 8, 40]),
    ],
    "flight": [
        Fact("departure_airport", TEXT, "It leaves from {}.", CITIES), Fact("passenger", TEXT, "{} is on board.", NAMES),
        Fact("seat_number", TEXT, "In seat {}.", ["12A", "3F", "27C"]), Fact("ticket_price", PRICE, "It cost {} euros.", [99, 240, 310]),
        Fact("cabin_class", _choice("economy", "business", "first"), "Travelling {}.", ["economy", "business", "first"]),
    ],
    "book": [
        Fact("title", TEXT, "The book is called {}.", ["The Long Road", "Silent River", "Winter Light"]), Fact("author", TEXT, "Written by {}.", NAMES),
        Fact("page_count", COUNT, "{} pages.", [180, 320, 512]), Fact("publication_year", COUNT, "It came out in {}.", [1987, 2004, 2019]),
        Fact("genre", _choice("novel", "poetry", "history"), "It is {}.", ["novel", "poetry", "history"]),
    ],
    "support": [
        Fact("ticket_subject", TEXT, "The customer says: {}.", ["printer is broken", "cannot log in", "screen is black"]), Fact("reported_by", TEXT, "Call from {}.", NAMES),
        Fact("urgency", _choice("low", "normal", "critical"), "It is {}.", ["low", "normal", "critical"]), Fact("devices_affected", COUNT, "{} machines have it.", [1, 4, 15]),
        Fact("is_resolved", YES, "Solved: {}.", [True, False]),
    ],
    "house": [
        Fact("street_address", TEXT, "It stands at {}.", ["12 Oak Street", "7 Mill Lane", "90 High Road"]), Fact("bedrooms", COUNT, "{} rooms to sleep in.", [2, 3, 5]),
        Fact("monthly_rent", PRICE, "{} a month.", [800, 1250, 2100]), Fact("landlord", TEXT, "It belongs to {}.", NAMES),
        Fact("pets_allowed", YES, "May I bring my dog: {}.", [True, False]),
    ],
    "match": [
        Fact("home_team", TEXT, "{} played on their own ground.", ["Rovers", "United", "Lions"]), Fact("visiting_team", TEXT, "They met {}.", ["Eagles", "Wolves", "Sharks"]),
        Fact("home_goals", COUNT, "They scored {}.", [0, 2, 5]), Fact("stadium_city", TEXT, "It took place in {}.", CITIES),
        Fact("referee", TEXT, "The whistle belonged to {}.", NAMES),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    schema: dict[str, Any]
    facts: dict[str, Any]
    prompt: str


def cases(count: int) -> list[Case]:
    """The first `count` cases: some facts of a domain each, in some order."""
    rng = random.Random(14)
    out = []
    for i in range(count):
        known = list(DOMAINS.values())[i % len(DOMAINS)]
        chosen = rng.sample(known, rng.randint(3, len(known)))
        values = {f.key: rng.choice(f.values) for f in chosen}
        told = [
            f.told.format({True: "yes", False: "no"}[v] if isinstance(v, bool) else v)
            for f, v in zip(chosen, values.values(), strict=True)
        ]
        schema = {
            "type": "object", "properties": {f.key: f.schema for f in chosen},
            "required": list(values), "additionalProperties": False,
        }  # fmt: skip
        out.append(Case(schema, values, "Give these facts as JSON. " + " ".join(told)))
    return out


def _same(told: Any, written: Any) -> bool:
    if isinstance(told, str):
        return (
            isinstance(written, str)
            and written.strip(" .").casefold() == told.strip(" .").casefold()
        )
    return (
        type(told) is type(written)
        and told == written
        or (isinstance(told, int) and isinstance(written, float) and told == written)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--show", type=int, default=0, help="answers to print")
    options = parser.parse_args()
    llm = LLM(options.model, offline=True)
    valid = canonical = right = facts = size = 0
    logprob = 0.0
    for i, case in enumerate(cases(options.count)):
        params = SamplingParams(
            temperature=0, max_tokens=200, logprobs=0, grammar=grammar.from_schema(case.schema)
        )
        (made,) = llm.chat([{"role": "user", "content": case.prompt}], params)
        answer: Any = {}
        if made.finish_reason == "stop":
            answer = json.loads(made.text)
            valid += jsonschema.Draft202012Validator(case.schema).is_valid(answer)
        right += sum(_same(value, answer.get(key)) for key, value in case.facts.items())
        facts += len(case.facts)
        canonical += llm.tokenizer.encode(made.text, add_bos=False) == made.tokens
        logprob += sum(made.logprobs or [])
        size += len(made.text.encode())
        if i < options.show:
            print(
                case.prompt, made.text, [llm.tokenizer.decode([t]) for t in made.tokens], sep="\n"
            )
    print(f"valid and complete    {valid} of {options.count}")
    print(f"facts right           {right} of {facts} ({right / facts:.1%})")
    print(f"canonical tokens      {canonical} of {options.count}")
    print(f"model's log-probability {logprob / size:.3f} nats a byte")


if __name__ == "__main__":
    main()
