"""The report of an export in lines to read."""

from planner import report_lines


def test_the_report_says_what_was_compared_and_what_was_not_run():
    numbers = {"mesh": "2, 2", "loss": 5.0, "loss_difference": 1e-7, "gradients": 21, "largest_error": 2e-6, "counts": "equal"}
    report = {
        "passed": True, "dry_run": ["dry-run rank 0/64: ok -> PASS"], "numbers": {"reference": numbers}, "seconds": 12.3,
        "not_run": "NCCL",
    }  # fmt: skip
    text = "\n".join(report_lines(report))
    assert "ok -> PASS" in text and "against the model itself" in text and "21 gradients" in text
    assert "took 12 s" in text and "not run here: NCCL" in text
    assert "too large" in "\n".join(report_lines({**report, "numbers": "too large"}))


def test_a_file_that_was_not_verified_says_so():
    assert report_lines({"passed": None}) == ("not checked",)
