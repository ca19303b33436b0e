"""`optimizer.state` and the state of a parameter as the dicts that torch's optimizers have: copies,
merges and removals. Each test does the same with torch.optim. Needs torch."""

import collections
import copy
import io
import pickle
import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from ballast import OffloadAdamW

MAKERS = (torch.optim.AdamW, OffloadAdamW)


def make(maker, steps: int = 2) -> tuple:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]
    optimizer = maker(parameters, lr=0.1)
    for _ in range(steps):
        step(optimizer, parameters[:2])
    return optimizer, parameters


def step(optimizer, parameters: list) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def plain(state) -> dict:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()}


COPIES = {
    "copy": lambda state: state.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "dict": dict,
    "unpacked": lambda state: {**state},
    "or": lambda state: state | {},
    "or reversed": lambda state: {} | state,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}
INDEPENDENT = ("copy.deepcopy", "pickle")


class StatesOfParameters(unittest.TestCase):
    def test_copies_are_dicts_of_the_same_values(self) -> None:
        for name, make_copy in COPIES.items():
            for maker in MAKERS:
                with self.subTest(name, maker=maker):
                    optimizer, (p, *_) = make(maker)
                    optimizer.state[p]["note"] = ["mine"]
                    made = make_copy(optimizer.state[p])
                    self.assertIs(type(made), dict)
                    self.assertEqual(plain(made), plain(optimizer.state[p]))
                    self.assertEqual(made["note"] is optimizer.state[p]["note"], name not in INDEPENDENT)

    def test_tensors_of_a_shallow_copy_are_those_of_the_state(self) -> None:
        for name, make_copy in COPIES.items():
            for maker in MAKERS:
                with self.subTest(name, maker=maker):
                    optimizer, (p, *_) = make(maker)
                    before = plain(optimizer.state[p])
                    made = make_copy(optimizer.state[p])
                    made["exp_avg"].fill_(7.0)
                    made["other"] = 1
                    expected = before if name in INDEPENDENT else {**before, "exp_avg": [7.0] * 3}
                    self.assertEqual(plain(optimizer.state[p]), expected)

    def test_merges(self) -> None:
        for maker in MAKERS:
            with self.subTest(maker=maker):
                optimizer, (p, q, _) = make(maker)
                state = optimizer.state[p]
                new = torch.full((3,), 5.0)
                self.assertEqual(plain(state | {"exp_avg": new})["exp_avg"], [5.0] * 3)
                self.assertEqual(plain({"exp_avg": new} | state), plain(state))
                self.assertEqual(list({"more": 1} | state)[0], "more")
                self.assertEqual(plain(state | optimizer.state[q]), plain(optimizer.state[q]))
                with self.assertRaises(TypeError):
                    state | [1]
                state |= {"exp_avg": new, "more": 2}
                self.assertIs(state, optimizer.state[p])
                self.assertEqual(plain(optimizer.state[p])["exp_avg"], [5.0] * 3)
                self.assertEqual(optimizer.state[p]["more"], 2)
                self.assertTrue(state == optimizer.state[p])

    def test_removals(self) -> None:
        for maker in MAKERS:
            with self.subTest(maker=maker):
                optimizer, (p, q, _) = make(maker)
                self.assertEqual(list(reversed(optimizer.state[p])), list(optimizer.state[p])[::-1])
                optimizer.state[p].clear()
                self.assertEqual(dict(optimizer.state[p]), {})
                state = optimizer.state[q]
                before = list(state)
                last, value = state.popitem()
                self.assertEqual((last, list(state)), (before[-1], before[:-1]))
                self.assertIsInstance(value, torch.Tensor)
                while state:
                    state.popitem()
                self.assertRaises(KeyError, state.popitem)
                step(optimizer, [p, q])
                self.assertEqual([float(optimizer.state[one]["step"]) for one in (p, q)], [1, 1])

    def test_a_deep_copy_stays_as_it_is(self) -> None:
        for maker in MAKERS:
            optimizer, parameters = make(maker)
            kept = copy.deepcopy(optimizer.state[parameters[0]])
            before = plain(kept)
            step(optimizer, parameters[:2])
            self.assertEqual(plain(kept), before)
            self.assertNotEqual(plain(optimizer.state[parameters[0]]), before)


class Mappings(unittest.TestCase):
    def test_shallow_copies_have_the_same_states(self) -> None:
        for name in ("copy", "copy.copy", "dict", "unpacked", "or", "or reversed"):
            for maker in MAKERS:
                with self.subTest(name, maker=maker):
                    optimizer, (p, q, r) = make(maker)
                    optimizer.state["note"] = 1
                    made = COPIES[name](optimizer.state)
                    reference = COPIES[name](collections.defaultdict(dict))
                    self.assertIs(type(made), type(reference))
                    self.assertEqual([id(key) for key in made], [id(p), id(q), id("note")])
                    self.assertIs(made[p], optimizer.state[p])
                    made[p]["exp_avg"] = torch.full((3,), 7.0)
                    self.assertEqual(optimizer.state[p]["exp_avg"].tolist(), [7.0] * 3)
                    del made[q]
                    self.assertIn(q, optimizer.state)
                    self.assertNotIn(r, optimizer.state)

    def test_deep_copies_have_copies_of_the_parameters(self) -> None:
        for maker in MAKERS:
            with self.subTest(maker=maker):
                optimizer, (p, q, r) = make(maker)
                optimizer.state[p]["note"] = ["mine"]
                parameters, made = copy.deepcopy(([p, q, r], optimizer.state))
                self.assertIs(type(made), collections.defaultdict)
                self.assertEqual(made["new"], {})
                for mine, its in zip((p, q), parameters):
                    self.assertIsNot(mine, its)
                    self.assertEqual(plain(made[its]), plain(optimizer.state[mine]))
                made[parameters[0]]["exp_avg"].fill_(7.0)
                made[parameters[0]]["note"].append("other")
                self.assertNotEqual(plain(made[parameters[0]]), plain(optimizer.state[p]))
                self.assertEqual(optimizer.state[p]["note"], ["mine"])

    def test_pickles(self) -> None:
        for maker in MAKERS:
            optimizer, (p, q, _) = make(maker)
            made = pickle.loads(pickle.dumps(optimizer.state))
            self.assertIs(type(made), collections.defaultdict)
            self.assertEqual([plain(s) for s in made.values()], [plain(optimizer.state[x]) for x in (p, q)])
            file = io.BytesIO()
            torch.save(dict(optimizer.state[p]), file)
            file.seek(0)
            self.assertEqual(plain(torch.load(file, weights_only=True)), plain(optimizer.state[p]))

    def test_merges_and_removals(self) -> None:
        for maker in MAKERS:
            with self.subTest(maker=maker):
                optimizer, (p, q, r) = make(maker)
                optimizer.state |= {r: dict(optimizer.state[p])}
                self.assertEqual(plain(optimizer.state[r]), plain(optimizer.state[p]))
                self.assertEqual([id(x) for x in reversed(optimizer.state)], [id(x) for x in (r, q, p)])
                key, state = optimizer.state.popitem()
                self.assertIs(key, r)
                self.assertEqual(float(state["step"]), 2)
                self.assertNotIn(r, optimizer.state)
                with self.assertRaises(TypeError):
                    optimizer.state | 3
                while optimizer.state:
                    optimizer.state.popitem()
                self.assertRaises(KeyError, optimizer.state.popitem)


if __name__ == "__main__":
    unittest.main()
