"""Settings of the tests of the model."""

from tests.layers.conftest import one_thread  # noqa: F401  (a fixture)
