"""Where things are in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

LM_EVAL = ROOT / ".venv" / "lm-eval"
"""lm-evaluation-harness, as `make lm-eval` fetches it."""
