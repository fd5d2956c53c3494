"""Names that a stranger can search for: no private English, no homonyms.

A function or file is called after its subject (`router_inputs`), not by a bare participle, adverb,
preposition or pronoun (`told`, `ahead`, `of`). The lists are kept here; add what you trip over.
"""

import ast
import collections
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1] / "jaxrl_llm"
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

# Words that say nothing of their subject when they stand alone.
# Prepositions and conjunctions, adverbs, pronouns and quantifiers, participles; not read, split,
# cut, put and cast, which are verbs too.
BARE = frozenset(
    """
    about above across after against along among and around as at before behind below beneath
    beside between beyond but by down during except for from in inside into like near of off on
    onto or out outside over past per since than through to toward under until up upon via with
    within without
    again ahead alone already also anew apart away back elsewhere even ever everywhere far here
    never now nowhere once only rather so still then there together too twice wide yet
    all any anything both each either everything it its mine most much neither none nothing one
    other others ours own same several some something such that theirs these they this those
    what whatever which who whole whom whose
    added admitted advised agreed aligned answered applied asked begun bounded built called
    carried changed chosen closed come computed continued converted copied crossed
    decided declared described divided done drawn dropped emptied entered expanded explained
    fetched filled filtered finished fitted found gathered given gone happened heard held
    hidden joined judged kept known laid learned left listed loaded looked lost lowered made
    mapped measured meant merged missing mixed moved named needed noted numbered opened ordered
    packed padded paired parsed passed picked placed planned played prepared rated
    reached ready received refused rendered repeated replaced restored resting returned rolled
    rounded said sampled saved scaled scored seen sent served settled shaped shared shifted
    shortened shown shrunk sold sorted spread staged started stated stopped stored summed
    taken taught tagged tested told torn traced tried trimmed trained trusted turned unified
    used waited wanted weighed whitened worked wrapped written
    """.split()  # noqa: SIM905
)
VAGUE_LOCALS = frozenset(("found", "given", "mine", "here", "told", "wanted"))
MAX_VAGUE_LOCALS = 40


def relative(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def definitions(kind):
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield path, node


def test_no_function_or_class_is_a_bare_word():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    bad = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path, node in definitions(functions)
        if node.name.strip("_").lower() in BARE
    ]
    assert not bad, "\n".join(bad)


def test_no_file_is_a_bare_word():
    bad = [relative(path) for path in TREES if path.stem in BARE]
    assert not bad, bad


def test_a_class_name_stands_once():
    places = collections.defaultdict(list)
    for path, node in definitions(ast.ClassDef):
        places[node.name].append(relative(path))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice, twice


def test_no_docstring_begins_with_what():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    bad = [
        f"{relative(path)}: {getattr(node, 'name', 'module')}"
        for path, node in definitions(kinds)
        if (ast.get_docstring(node) or "").startswith(("Returns what", "What ", "Returns who"))
    ]
    assert not bad, "\n".join(bad)


def test_locals_are_named_after_their_contents():
    vague = [
        f"{relative(path)}:{node.lineno} {node.id}"
        for path, node in definitions(ast.Name)
        if isinstance(node.ctx, ast.Store) and node.id in VAGUE_LOCALS
    ]
    assert len(vague) <= MAX_VAGUE_LOCALS, "\n".join(vague)
