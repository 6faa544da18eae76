"""The sections of the page, in order. To add one: write its file here, and add it to this list."""

from __future__ import annotations

from blocktrain.report.section import Section
from blocktrain.report.sections.accuracy import ACCURACY
from blocktrain.report.sections.evaluations import EVALUATIONS
from blocktrain.report.sections.loss import BY_TIME, BY_TOKENS
from blocktrain.report.sections.prefix_cache import PREFIX_CACHE
from blocktrain.report.sections.samples import SAMPLES
from blocktrain.report.sections.step_flops import STEP_FLOPS
from blocktrain.report.sections.step_memory import STEP_MEMORY
from blocktrain.report.sections.step_series import GRADIENT_NORM, LEARNING_RATE
from blocktrain.report.sections.tracked_memory import TRACKED_MEMORY

SECTIONS: list[Section] = [
    BY_TOKENS,
    ACCURACY,
    BY_TIME,
    STEP_MEMORY,
    STEP_FLOPS,
    LEARNING_RATE,
    GRADIENT_NORM,
    TRACKED_MEMORY,
    PREFIX_CACHE,
    SAMPLES,
    EVALUATIONS,
]
