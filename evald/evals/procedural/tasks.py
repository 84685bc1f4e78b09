"""The tasks that can be had: what ``probe`` has found fit in CHECKED_VERSION of the library."""

from __future__ import annotations

import difflib
import enum

#: version of reasoning-gym that both lists were made with (40 questions of each of two seeds, three
#: hash seeds); in another one its tasks may be others.
CHECKED_VERSION = "0.1.25"


class Unfit(enum.StrEnum):
    """Why a task cannot be had."""

    HASH_SEED = "its questions change with Python's hash seed"
    RAISES = "its verifier raises an error on junk answers"
    REWARDS_JUNK = "its verifier gives junk answers full marks"
    RUNS_CODE = "its verifier runs the answer as Python code"
    NO_REFERENCE = "it has no reference answers by which its verifier could be tried"
    REFERENCE = "its verifier refuses its own reference answer once that has been in a file"
    NOT_JSON = "some of its questions hold what cannot be kept in a file"
    SETTINGS = "it makes nothing without settings of its own"


FIT = frozenset({
    "ab", "acre", "advanced_geometry", "aiw", "arc_1d", "base_conversion", "basic_arithmetic",
    "bf", "binary_alternation", "bitwise_arithmetic", "caesar_cipher", "calendar_arithmetic",
    "chain_sum", "circuit_logic", "color_cube_rotation", "count_bits", "count_primes",
    "course_schedule", "cryptarithm", "decimal_arithmetic", "decimal_chain_sum", "dice",
    "emoji_mystery", "family_relationships", "figlet_font", "fraction_simplification",
    "futoshiki", "gcd", "group_anagrams", "jugs", "kakurasu", "knights_knaves",
    "largest_island", "lcm", "leg_counting", "letter_counting", "letter_jumble",
    "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid",
    "needle_haystack", "number_filtering", "number_format", "number_sequence",
    "number_sorting", "palindrome_generation", "palindrome_partitioning", "path_star",
    "polynomial_equations", "pool_matrix", "power_function", "products", "quantum_lock",
    "rectangle_count", "rotate_matrix", "rotten_oranges", "self_reference",
    "sentence_reordering", "shortest_path", "simple_equations", "simple_geometry", "sokoban",
    "spell_backward", "string_manipulation", "string_splitting", "string_synthesis", "sudoku",
    "survo", "syllogism", "time_intervals", "tower_of_hanoi", "tsumego",
    "word_sequence_reversal", "word_sorting", "zebra_puzzles",
})  # fmt: skip

UNFIT = {
    "arc_agi": Unfit.REFERENCE,
    "binary_matrix": Unfit.RUNS_CODE,
    "boxnet": Unfit.NO_REFERENCE,
    "codeio": Unfit.HASH_SEED,
    "coin_flip": Unfit.RAISES,
    "complex_arithmetic": Unfit.REWARDS_JUNK,
    "composite": Unfit.SETTINGS,
    "countdown": Unfit.RUNS_CODE,
    "game_of_life": Unfit.RAISES,
    "game_of_life_halting": Unfit.REWARDS_JUNK,
    "graph_color": Unfit.NO_REFERENCE,
    "gsm_symbolic": Unfit.NOT_JSON,
    "intermediate_integration": Unfit.RUNS_CODE,
    "isomorphic_strings": Unfit.HASH_SEED,
    "knight_swap": Unfit.HASH_SEED,
    "list_functions": Unfit.HASH_SEED,
    "n_queens": Unfit.RUNS_CODE,
    "polynomial_multiplication": Unfit.RUNS_CODE,
    "prime_factorization": Unfit.RAISES,
    "propositional_logic": Unfit.NO_REFERENCE,
    "puzzle24": Unfit.RUNS_CODE,
    "ransom_note": Unfit.HASH_SEED,
    "rearc": Unfit.REFERENCE,
    "rubiks_cube": Unfit.NO_REFERENCE,
    "rush_hour": Unfit.NO_REFERENCE,
    "simple_integration": Unfit.RUNS_CODE,
    "spiral_matrix": Unfit.RUNS_CODE,
    "string_insertion": Unfit.RUNS_CODE,
    "word_ladder": Unfit.HASH_SEED,
}


def task_fault(task: str) -> str | None:
    """Say why a task cannot be had, or None."""
    if task in FIT:
        return None
    if task in UNFIT:
        return f"{task!r} cannot be had: {UNFIT[task]}"
    near = difflib.get_close_matches(task, sorted(FIT), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{task!r} is unknown; {hint}there are {', '.join(sorted(FIT))}"
