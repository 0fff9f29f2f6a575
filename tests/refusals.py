import pytest


def refusal(function, *arguments, **settings) -> str:
    """The one sentence that a call is refused with."""
    with pytest.raises(ValueError) as caught:
        function(*arguments, **settings)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500 and message.endswith(".")
    return message
