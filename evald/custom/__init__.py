"""What a generate function of kind ``custom`` sees of evald; standard library only.

The function is the user's own: it asks the model as often as it likes, uses tools in between, and
returns what is to be graded. It runs in a process of its own, many questions at a time.
"""

from evald.custom.contract import (
    Answer,
    Client,
    Generate,
    GenerationError,
    Prompt,
    Question,
    Result,
)

__all__ = ["Answer", "Client", "Generate", "GenerationError", "Prompt", "Question", "Result"]
