"""Settings: read once, bounded, told by name when wrong."""

import pytest

from service.errors import SettingsInvalid
from service.settings import Settings


def test_settings_without_anything_are_the_defaults() -> None:
    """Every field has a default."""
    settings = Settings.load([], {"PATH": "/bin"})

    assert settings == Settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)


def test_settings_flag_wins_over_environment_over_default() -> None:
    """The nearer to the person, the stronger."""
    environ = {"HEADWISE_PORT": "1", "HEADWISE_MAX_ROWS": "7"}

    settings = Settings.load(["--port", "2"], environ)

    assert (settings.port, settings.max_rows, settings.max_length) == (2, 7, 4096)


def test_settings_empty_variable_counts_as_unset() -> None:
    """`HEADWISE_PORT= make run` is no mistake."""
    assert Settings.load([], {"HEADWISE_PORT": ""}).port == 8000


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {"HEADWISE_PROT": "1"}, "HEADWISE_PROT: no such setting; did you mean HEADWISE_PORT?"),
        ([], {"HEADWISE_ZZZ": "1"}, "HEADWISE_ZZZ: no such setting; see --help"),
        ([], {"HEADWISE_PORT": "x"}, "HEADWISE_PORT: Input should be a valid integer"),
        ([], {"HEADWISE_PORT": "70000"}, "less than or equal to 65535, got '70000'"),
        (["--port", "-1"], {}, "--port: Input should be greater than or equal to 0, got '-1'"),
        (["--provider", "tpu"], {}, "--provider: Input should be 'cpu' or 'cuda', got 'tpu'"),
        (["--timeout-s", "nan"], {}, "--timeout-s: Input should be"),
        ([], {"HEADWISE_HOST": "x", "HEADWISE_THREADS": "0"}, "HEADWISE_THREADS"),
    ],
)
def test_settings_wrong_value_is_refused_by_name(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    """The message names the flag or variable, what was expected and what came."""
    with pytest.raises(SettingsInvalid) as caught:
        Settings.load(argv, environ)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADWISE_PORT", "tcp://10.0.0.1:8000"),
        ("HEADWISE_SERVICE_HOST", "10.0.0.1"),
        ("HEADWISE_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
    ],
)
def test_settings_injected_by_kubernetes_are_explained(name: str, value: str) -> None:
    """A Service called headwise puts such variables into every pod."""
    with pytest.raises(SettingsInvalid, match="enableServiceLinks: false"):
        Settings.load([], {name: value})


def test_settings_of_unsent_answers_have_room_for_the_largest_one() -> None:
    """One largest answer always fits; without a word there is room for two."""
    settings = Settings.load([], {"HEADWISE_MAX_ANSWER_BYTES": str(2**31)})
    assert settings.unsent_bytes(2**40) == 2**32

    with pytest.raises(SettingsInvalid, match=r"--max-unsent-bytes: .*at least max_answer_bytes"):
        Settings.load(["--max-unsent-bytes", "99"], {"HEADWISE_MAX_ANSWER_BYTES": "100"})


def test_settings_of_bodies_and_answers_follow_the_memory_limit() -> None:
    """Unless they are set."""
    settings = Settings.load([], {})
    assert settings.bodies_bytes(700 * 2**20) == 350 * 2**20
    assert settings.unsent_bytes(700 * 2**20) == 175 * 2**20

    settings = Settings.load(
        ["--max-bodies-bytes", "5"], {"HEADWISE_MAX_UNSENT_BYTES": "600000000"}
    )
    assert settings.bodies_bytes(2**20) == 5
    assert settings.unsent_bytes(2**20) == 600_000_000


def test_settings_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` is complete."""
    with pytest.raises(SystemExit) as caught:
        Settings.load(["--help"], {})

    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for name, field in Settings.model_fields.items():
        assert Settings.flag(name) in text
        assert " ".join((field.description or "missing").split()) in text


def test_settings_are_frozen() -> None:
    """Nothing changes them after the start."""
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]
