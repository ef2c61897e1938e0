"""The same instructions as IFEval's, so the same checkers."""

import data.ifeval.score as ifeval

MAX_NEW_TOKENS = ifeval.MAX_NEW_TOKENS  # our choice: IFEval's, so that the two can be compared
score = ifeval.score
