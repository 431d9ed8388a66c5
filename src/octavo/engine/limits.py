"""How many tokens are taken of a sequence at once, or looked at."""

MAX_MULTI_STEPS = 8  # steps of one call
MAX_DRAFT = 15  # tokens verified in a step of one sequence, which are one more row each
MAX_FORCED = 256  # tokens after those of a step that need none: others wait while they are taken
MAX_AHEAD = max(MAX_MULTI_STEPS, MAX_DRAFT + 1)
MAX_BLANK = 64  # blank tokens before a reply's thoughts; with more there are taken to be none
