"""The package in an editor: types, signatures, dir() and help()."""

import ast
import importlib.util
import inspect
import pathlib
import pydoc
import re
import runpy
import subprocess
import sys
import unittest

from support import FolderTest, needs_torch

import ballast
from ballast import _ballast, aio

TYPED = pathlib.Path(__file__).resolve().parent / "programs/typed.py"
README = pathlib.Path(__file__).resolve().parents[2] / "src/python/README.md"
STUBS = pathlib.Path(ballast.__file__).with_name("_ballast.pyi")
OPTIMIZERS = ["OffloadOptimizer", *(f"Offload{row['title']}" for row in _ballast.optimizer_rows().values())]
needs_mypy = unittest.skipIf(importlib.util.find_spec("mypy") is None, "mypy is not installed")


class Names(FolderTest):
    @needs_torch
    def test_dir_and_help_have_the_optimizers(self):
        text = pydoc.plain(pydoc.render_doc(ballast))
        for name in OPTIMIZERS:
            self.assertIn(name, dir(ballast))
            self.assertIn(f"class {name}(", text)
            self.assertIn(name, ballast.__all__)

    def test_what_is_listed_exists(self):
        for name in [*ballast.__all__, *dir(ballast)]:
            self.assertIsNotNone(getattr(ballast, name, None) or name == "__spec__", name)
        self.assertRaisesRegex(AttributeError, "module 'ballast' has no attribute 'nonsense'",
                               lambda: ballast.nonsense)

    @needs_torch
    def test_signatures_have_all_arguments(self):
        for name in OPTIMIZERS:
            if name == "OffloadOptimizer":
                continue
            parameters = inspect.signature(getattr(ballast, name)).parameters
            self.assertNotIn(inspect.Parameter.VAR_KEYWORD, [p.kind for p in parameters.values()], name)
            self.assertLessEqual({"params", "lr", "device", "path", "host_bytes", "overlap", "threads"},
                                 set(parameters))
            for argument, parameter in parameters.items():
                # Several arguments may share an entry.
                self.assertRegex(getattr(ballast, name).__doc__,
                                 rf"(?m)^ +([a-z_]+, )*{argument}(, [a-z_]+)*: ", name)
                self.assertIsNot(parameter.annotation, parameter.empty, f"{name}({argument})")

    @needs_torch
    def test_help_names_all_arguments_of_offload(self):
        for name in inspect.signature(ballast.offload).parameters:
            self.assertRegex(ballast.offload.__doc__, rf"(?m)^ +{name}: ")

    def test_help_names_all_arguments(self):
        for function in (ballast.train, ballast.plan, aio.empty, aio.bench, aio.tune, aio.File,
                         aio.File.read_into, aio.File.write_from, aio.Future.result):
            for name, parameter in inspect.signature(function).parameters.items():
                if name != "self":
                    place = f"{function.__qualname__}({name})"
                    self.assertRegex(inspect.getdoc(function), rf"\b{name}\b", place)
                    self.assertIsNot(parameter.annotation, parameter.empty, place)

    @needs_torch
    def test_options_are_the_arguments_of_the_base(self):
        from ballast._options import Options

        arguments = inspect.signature(ballast.OffloadOptimizer.__init__).parameters.values()
        self.assertEqual(list(Options.__annotations__),
                         [p.name for p in arguments if p.kind is p.KEYWORD_ONLY and p.name[0] != "_"])

    def test_import_is_light(self):
        printed = self.run_python("""
            import sys
            before = set(sys.modules)
            import ballast
            added = set(sys.modules) - before
            print(added & {"torch", "asyncio", "typing", "dataclasses", "json", "inspect", "logging"})
        """)
        self.assertEqual(printed, "set()\n")

    def test_without_torch(self):
        printed = self.run_python("""
            import sys
            sys.modules["torch"] = None
            import pydoc
            import ballast
            from ballast import *
            assert "OffloadAdamW" not in dir(ballast) and "train" in dir(ballast)
            pydoc.render_doc(ballast)
            try:
                ballast.OffloadAdamW
            except ImportError as error:
                print(error)
            try:
                from ballast import OffloadSGD
            except ImportError as error:
                print(error)
        """)
        self.assertEqual(printed, "".join(f"ballast.{name} needs PyTorch: pip install ballast-offload[torch]\n"
                                          for name in ("OffloadAdamW", "OffloadSGD")))


class Classes(unittest.TestCase):
    def test_they_are_those_of_the_table(self):
        root = pathlib.Path(__file__).resolve().parents[2]
        tool = runpy.run_path(str(root / "tools/dev/write_optimizer_classes.py"))
        self.assertEqual((root / "src/python/ballast/optim.py").read_text(), tool["class_file"](),
                         "run tools/dev/write_optimizer_classes.py")


class Examples(unittest.TestCase):
    """README.md has only names and arguments that exist."""

    @needs_torch
    def test_code_in_the_readme(self):
        import torch

        names = {"ballast": ballast, "aio": aio, "torch": torch, "run": ballast.Run, "optimizer": ballast.OffloadAdamW,
                 "plan": inspect.signature(ballast.plan).return_annotation, "file": aio.File,
                 "future": aio.Future}
        names["plan"] = vars(sys.modules[ballast.plan.__module__])[names["plan"]]
        blocks = re.findall(r"(?s)```python\n(.*?)```", README.read_text())
        calls = 0
        for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
            if (isinstance(node, ast.Attribute)
                    and not isinstance(self.find(node.value, names), (property, str, type(None)))):
                self.assertIsNotNone(self.find(node, names), ast.unparse(node))
            if isinstance(node, ast.Call) and re.fullmatch(r"(?!torch)(\w+)(\.\w+)+", ast.unparse(node.func)):
                if ast.unparse(node.func).split(".")[0] not in names:
                    continue
                called = self.find(node.func, names)
                self.assertTrue(callable(called), ast.unparse(node))
                arguments = inspect.signature(called).parameters
                for keyword in node.keywords:
                    self.assertIn(keyword.arg, arguments, ast.unparse(node))
                calls += 1
        self.assertGreater(calls, 10)

    def find(self, node, names):
        """Returns the object of a dotted name, or None."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self.find(node.value, names)
        if isinstance(owner, (property, str)):  # of a type that is not looked up
            return None
        fields = getattr(owner, "__annotations__", {})
        return getattr(owner, node.attr, fields.get(node.attr)) if owner is not None else None


class Checkers(FolderTest):
    @needs_torch
    @needs_mypy
    def test_mypy_accepts_the_package_and_finds_mistakes_in_a_program(self):
        done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", self.path / "cache",
                               "--exclude", "/preparing/", TYPED, STUBS.parent], capture_output=True, text=True, timeout=900, check=False)
        found = set(re.findall(r"([\w.]+):(\d+): error: .*\[([\w-]+)\]", done.stdout))
        expected = {(TYPED.name, str(number), line.split("# mistake: ")[1])
                    for number, line in enumerate(TYPED.read_text().splitlines(), 1) if "# mistake: " in line}
        self.assertEqual(found, expected, done.stdout + done.stderr)


class Aliases(ast.NodeTransformer):
    """Replaces names by the types that they stand for."""

    def __init__(self, types):
        self.types = types

    def visit_Name(self, node):
        return self.visit(self.types[node.id]) if node.id in self.types else node


class Stubs(unittest.TestCase):
    """The stubs of the extension module agree with its signatures."""

    def signature(self, function, name):
        """Returns the syntax tree of a type, with the names of the stubs."""
        ((text, _, defaults),) = function.__nb_signature__
        for number, value in reversed(list(enumerate(defaults or ()))):
            text = text.replace(f"\\{number}", repr(value))
        text = re.sub(r"memoryview\[.*?\)\]", "memoryview", text).replace("ballast._ballast.", "")
        text = text.replace("collections.abc.Sequence", "list").replace("collections.abc.Mapping", "dict")
        return ast.parse(text.replace("def (", f"def {name}(") + ": ...").body[0]

    def assert_same(self, stub, real, where):
        own, its = stub.args, real.args
        for kind in ("posonlyargs", "args", "kwonlyargs"):
            self.assertEqual([a.arg for a in getattr(own, kind)], [a.arg for a in getattr(its, kind)], where)
        for kind in ("defaults", "kw_defaults"):
            self.assertEqual([d and ast.literal_eval(d) for d in getattr(own, kind)],
                             [d and ast.literal_eval(d) for d in getattr(its, kind)], where)
        pairs = [(a.annotation, b.annotation, f"{where}({a.arg})") for a, b in
                 zip(own.args + own.kwonlyargs, its.args + its.kwonlyargs) if a.arg != "self"]
        for mine, real_type, place in [*pairs, (stub.returns, real.returns, where)]:
            mine, real_type = ast.unparse(Aliases(self.aliases).visit(mine)), ast.unparse(real_type)
            if real_type in ("dict", "list", "tuple"):  # nanobind does not have its parts
                mine = mine.split("[")[0]
            if real_type not in ("object", "object | None"):
                self.assertEqual(mine, real_type, place)

    def test_they_are_the_signatures_of_the_module(self):
        found = set()
        nodes = ast.parse(STUBS.read_text()).body
        self.aliases = {node.targets[0].id: node.value for node in nodes if isinstance(node, ast.Assign)}
        for node in nodes:
            if isinstance(node, ast.AnnAssign):
                self.assertEqual(node.annotation.id, type(getattr(_ballast, node.target.id)).__name__)
                found.add(node.target.id)
            elif isinstance(node, ast.FunctionDef):
                self.assert_same(node, self.signature(getattr(_ballast, node.name), node.name), node.name)
                found.add(node.name)
            elif isinstance(node, ast.ClassDef):
                self.compare_class(node, getattr(_ballast, node.name))
                found.add(node.name)
        self.assertEqual(found, {name for name in dir(_ballast) if not name.startswith("_")})

    def compare_class(self, stub, real):
        members = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
        for node in members:
            member = vars(real)[node.name]
            where = f"{stub.name}.{node.name}"
            self.assertEqual(isinstance(member, property), bool(node.decorator_list), where)
            function = member.fget if isinstance(member, property) else member
            self.assert_same(node, self.signature(function, node.name), where)
        listed = {name for name, value in vars(real).items()
                  if isinstance(value, property) or hasattr(value, "__nb_signature__")}
        self.assertEqual({node.name for node in members}, listed, stub.name)


if __name__ == "__main__":
    unittest.main()
