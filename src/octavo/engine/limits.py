"""How many tokens one call of an engine may give a sequence."""

MAX_MULTI_STEPS = 8  # steps of one call
MAX_DRAFT = 15  # tokens verified in a step of one sequence, which are one more row each
MAX_FORCED = 256  # tokens after those of a step that need none: others wait while they are taken
MAX_AHEAD = max(MAX_MULTI_STEPS, MAX_DRAFT + 1)
