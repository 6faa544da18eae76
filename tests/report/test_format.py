"""Numbers as people write them."""

import math

from blocktrain.report.format import agree, flops_text, format_small, percent, seconds_text


def test_quantities_in_words():
    assert flops_text(950) == "950 FLOP"
    assert flops_text(1.24e12) == "1.24 TFLOP"
    assert flops_text(999_700) == "1 MFLOP"
    assert flops_text(3.1e21) == "3.1 ZFLOP"
    assert percent(0.6652) == "67 %"
    assert percent(-0.012) == "−1.2 %"
    assert percent(0.00713) == "0.71 %"
    assert format_small(2e-5) == "2e-5"
    assert format_small(0.000277) == "2.77e-4"
    assert format_small(0.8) == "0.8"
    assert flops_text(-2_500) == "−2.5 kFLOP"
    assert [seconds_text(value) for value in (0, 0.00004, 0.0042, 0.99949)] == ["0ms", "0.04ms", "4.2ms", "999ms"]
    assert [seconds_text(value) for value in (0.9996, 75, -0.2, -75)] == ["1.0s", "1m 15s", "−200ms", "−1m 15s"]


def test_three_digits_decide_whether_two_figures_agree():
    assert agree(3.5200, 3.5203)
    assert not agree(3.52, 3.53)
    assert not agree(3.52, math.nan)
