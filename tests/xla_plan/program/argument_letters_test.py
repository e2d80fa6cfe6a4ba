"""Letters of arguments: given by patterns, proposed for the rest, and refused."""

import jax
import jax.numpy as jnp
import pytest

from tests.xla_plan import foreign_models
from xla_plan.program import argument_letters, argument_paths, stablehlo_program


def _program(function, *args, donated=()):
    jitted = jax.jit(function, donate_argnums=donated, keep_unused=True)
    return stablehlo_program.of_jitted(jitted, args, "cpu")


def _spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _by_path(program, letters):
    names = [argument_paths.path(argument.name) for argument in program.arguments]
    return {name: " ".join(own) for name, own in zip(names, letters.arguments, strict=True)}


@pytest.fixture(scope="module")
def plain():
    step, args = foreign_models.plain()
    return stablehlo_program.of_jitted(step, args, "cpu")


def test_a_transformers_weights_and_moments_have_the_letters_of_its_einsums(plain):
    letters = argument_letters.read(plain, ())
    by_path = _by_path(plain, letters)
    # A are hidden, C the model, D heads, E queries' and keys', F values'; G is the length.
    expected = {
        "down": "_ A C",
        "k": "_ C D E",
        "o": "_ D F C",
        "q": "_ C D E",
        "up": "_ C A",
        "v": "_ C D F",
    }
    assert by_path == {
        **{f"state/moments/{name}": own for name, own in expected.items()},
        **{f"state/params/{name}": own for name, own in expected.items()},
        "batch": "B G C",
    }
    assert letters.batch == "B"
    assert letters.sizes == {"A": 64, "C": 32, "D": 8, "E": 4, "F": 4, "B": 16, "G": 12}


def test_a_users_letters_go_where_their_dims_go(plain):
    letters = argument_letters.read(plain, ["params/up$=_ M H", "params/q$=_ M heads _"])
    by_path = _by_path(plain, letters)
    # The moments and other weights follow, and a dim named `_` stays whole.
    assert by_path["state/moments/down"] == "_ H M" and by_path["batch"] == "B D M"
    assert by_path["state/params/k"] == "_ M heads A"
    assert by_path["state/params/q"] == "_ M heads _"


def test_letters_that_a_user_keeps_apart_stay_apart(plain):
    letters = argument_letters.read(plain, ["/q$=_ M N D", "/k$=_ M K D", "/v$=_ V K D"])
    by_path = _by_path(plain, letters)
    assert by_path["state/params/q"] == "_ M N D" and by_path["state/params/k"] == "_ M K D"
    assert by_path["state/moments/v"] == "_ V K D"


def test_layers_have_common_letters_unless_they_share_a_dim():
    def transformer(layers, x):
        for layer in layers:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return x

    layer = {"up": _spec(3, 7), "down": _spec(7, 3)}
    program = _program(transformer, [layer, layer], _spec(5, 3))
    assert _by_path(program, argument_letters.read(program, ())) == {
        "layers/0/down": "A C",
        "layers/0/up": "C A",
        "layers/1/down": "A C",
        "layers/1/up": "C A",
        "x": "B C",
    }

    def perceptron(layers, x):
        for layer in layers:
            x = jax.nn.relu(x @ layer)
        return x

    program = _program(perceptron, [_spec(3, 3)] * 3, _spec(5, 3))
    by_path = _by_path(program, argument_letters.read(program, ()))
    assert list(by_path.values()) == ["A C", "C D", "D E", "B A"]


def test_rows_of_a_table_that_is_looked_up_and_dims_of_one_are_never_split():
    def loss(params, tokens):
        return jnp.sum((params["table"][tokens] * params["scale"]) @ params["head"])

    def step(params, tokens):
        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, tokens))

    params = {"table": _spec(20, 6), "scale": _spec(1, 6), "head": _spec(6, 7)}
    program = _program(step, params, _spec(8, 4, dtype=jnp.int32), donated=0)
    assert _by_path(program, argument_letters.read(program, ())) == {
        "params/head": "A C",
        "params/scale": "_ A",
        "params/table": "D _",
        "tokens": "B E",
    }

    # Unless a user wants it.
    letters = argument_letters.read(program, ["table=V M"])
    assert _by_path(program, letters)["params/table"] == "V M"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["up"], "--letters=up: expected REGEX=LETTERS, with a letter or word for each dim and _"),
        (["up=_ M 1"], "--letters=up=_ M 1: expected REGEX=LETTERS"),
        (
            ["(=M H"],
            "--letters=(=M H: not a regular expression (missing ), unterminated subpattern",
        ),
        (
            ["mlp/wi=M H"],
            "--letters=mlp/wi=M H: found in none of 13 arguments, such as state/moments/down, ",
        ),
        (
            ["up=_ M H", "moments/=_ A B"],
            "--letters=moments/=_ A B: 3 letters for state/moments/k, which is f32[3,32,8,4] and",
        ),
        (["/up=M H"], "--letters=/up=M H: 2 letters for state/moments/up, which is f32[3,32,64]"),
        (
            ["/up=_ M H", "params/up=_ M F"],
            "--letters: state/params/up has different letters, by '/up=_ M H' and 'params/up=_ M F",
        ),
        (["/up=_ M H", "batch=B H M"], "--letters: H is 64 in state/moments/up and 12 in batch."),
    ],
)
def test_wrong_letters_are_refused_in_one_line(plain, texts, message):
    with pytest.raises(ValueError) as error:
        argument_letters.read(plain, texts)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_program_of_scalars_has_nothing_to_split():
    program = _program(lambda x: x + 1, _spec())
    with pytest.raises(ValueError, match="no dim of its arguments can have a letter, so that"):
        argument_letters.read(program, ())


def test_paths_are_those_of_the_trees():
    path = argument_paths.path
    assert path("state['params']['Dense_0']['kernel']") == "state/params/Dense_0/kernel"
    assert path("state.layers[0].weight") == "state/layers/0/weight"
    assert path("opt[0].mu['a/b']") == "opt/0/mu/a/b"
