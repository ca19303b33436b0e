#!/usr/bin/env python3
"""Lists the attributes of a config that transformers' classes read, for src/model/description/families/read_attributes.cpp.

    python tools/dev/config_attributes.py > src/model/description/families/read_attributes.cpp
    tools/format.sh

Needs transformers; the build and the tests do not. For each family it follows the names that the
class of the language model uses through its module, and through the modules of transformers that
compute masks, rotary positions and mixtures of experts. An attribute counts as read if the code says
config.NAME, getattr(config, "NAME") or hasattr(config, "NAME"), or if the class of the config
itself says self.NAME outside its fields. Attributes that PreTrainedConfig handles for all models
are not listed (config/checkpoint_unknown_keys.cpp has those), except COMMON.
"""

import ast
import importlib
import inspect
import pathlib
import re
import textwrap

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Families whose model_type is not their name.
TYPES = {name: f"{name}_text" for name in ("muse_glimmer", "gemma3", "gemma4", "qwen3_5",
                                                "qwen3_5_moe")}
# Further types that the class of a model_type reads. Each has a class NAME ... Config.
OTHERS = {"qwen2": ["qwen2_vl_text", "qwen2_5_vl_text"], "qwen3": ["qwen3_vl_text"],
          "gemma4_text": ["gemma4_unified_text"]}
# Modules of transformers outside models/ whose code the classes run.
SHARED = ["transformers.masking_utils", "transformers.modeling_rope_utils",
          "transformers.integrations.moe", "transformers.modeling_layers"]
# Ends of names at which following stops: code for all models and first weights (PreTrainedModel),
# and classes for other tasks.
STOPS = ("PreTrainedModel", "GenerationMixin", "PreTrainedConfig", "Classification",
         "QuestionAnswering")
# Keys that PreTrainedConfig and PreTrainedModel read for every class, and that can change what it
# computes: overrides of single layers, configs of other parts, files of weights.
COMMON = ["decoder", "generator", "per_layer_config", "text_config", "text_encoder",
          "tie_word_embeddings", "transformers_weights"]
# Classes of quantization_config by their quant_method.
QUANTIZATIONS = {"bitsandbytes": "BitsAndBytesConfig", "fp8": "FineGrainedFP8Config",
                 "mxfp4": "Mxfp4Config"}
# Attributes and methods of PreTrainedConfig, which are no keys of a config.json.
METHODS = {name for name in dir(transformers.PreTrainedConfig) if not name.startswith("__")}


def definitions(module):
    tree = ast.parse(pathlib.Path(importlib.import_module(module).__file__).read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    return found


def is_config(node):
    """Whether the expression is a config: config, self.config, text_config, config.get_text_config()."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "get_text_config"
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == "config" or name.endswith("_config")


def reads(node, is_own):
    """The names of attributes that the code below `node` reads of values for which is_own() holds."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and is_own(inner.value) and isinstance(inner.ctx, ast.Load):
            found.add(inner.attr)
        if not isinstance(inner, ast.Call) or not inner.args:
            continue
        function = inner.func
        if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr") and is_own(inner.args[0]):
            if isinstance(inner.args[1], ast.Constant):
                found.add(inner.args[1].value)
    return found


def read_by_modelling(module, start, shared):
    """The attributes that the definition `start` of `module` reads, and all that it uses."""
    known = {**shared, **definitions(module)}
    todo, seen, found = [start], set(), set()
    while todo:
        name = todo.pop()
        if name in seen or name.endswith(STOPS) or name not in known:
            continue
        seen.add(name)
        found |= reads(known[name], is_config)
        todo += [inner.id for inner in ast.walk(known[name]) if isinstance(inner, ast.Name)]
    return found


def read_by_config(config):
    """The attributes that methods of the class of a config read, and other names of keys."""
    found = set(config.attribute_map) | set(config.attribute_map.values())
    for one in config.__mro__:
        if one is transformers.PreTrainedConfig:
            break
        if not one.__module__.startswith("transformers.models"):
            continue
        node = definitions(one.__module__)[one.__name__]
        for method in node.body:
            if isinstance(method, ast.FunctionDef):
                found |= reads(method, lambda value: isinstance(value, ast.Name) and value.id == "self")
                found |= {call.args[0].value for call in ast.walk(method)
                          if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
                          and isinstance(call.func.value, ast.Name) and call.func.value.id == "kwargs"
                          and call.func.attr in ("get", "pop", "setdefault") and call.args
                          and isinstance(call.args[0], ast.Constant)}
                found |= {test.left.value for test in ast.walk(method)
                          if isinstance(test, ast.Compare) and isinstance(test.left, ast.Constant)
                          and isinstance(test.comparators[0], ast.Name)
                          and test.comparators[0].id == "kwargs"}
    return found


def start_of(model_type, config):
    """The module and the class of the model whose config this is."""
    module = config.__module__.replace(".configuration_", ".modeling_")
    bases = config.__name__.removesuffix("TextConfig"), config.__name__.removesuffix("Config")
    for end in ("ForCausalLM", "LMHeadModel", "TextModel", "Model"):
        for base in bases:
            if base + end in definitions(module):
                return module, base + end
    raise SystemExit(f"no class for {model_type}")


def attributes_of(model_type, shared):
    config = CONFIG_MAPPING[model_type]
    found = read_by_modelling(*start_of(model_type, config), shared) | read_by_config(config)
    return {name for name in found if name not in METHODS or name in config.attribute_map
            if not isinstance(getattr(config, name, None), property)} | set(COMMON)


def arguments_of(quantization):
    """The keys of a quantization_config that transformers reads."""
    init = inspect.signature(getattr(transformers, quantization).__init__)
    return {name for name in init.parameters if name not in ("self", "kwargs")} | {"quant_method"}


def row(name, keys):
    lines = textwrap.wrap(" ".join(sorted(keys)), 88)
    text = "\n".join(f'     "{line} "' for line in lines)
    return f'    {{"{name}",\n{text[:-2]}"}},\n'


HEAD = """// Made by tools/dev/config_attributes.py from transformers {version}. Do not edit.

#include <array>
#include <utility>

#include "ballast/model/family.h"

namespace ballast::model {{
namespace {{

using Row = std::pair<std::string_view, std::string_view>;
constexpr std::array<Row, {rows}> kRead = {{{{
"""
END = """}};

}  // namespace

std::optional<std::string_view> read_attributes(std::string_view model_type) {
  for (const auto& [type, names] : kRead) {
    if (type == model_type) return names;
  }
  return {};
}

}  // namespace ballast::model
"""


def model_types():
    """The model_type of each family that the program has."""
    rows = (ROOT / "src/model/description/families/families.h").read_text()
    names = re.findall(r"^  X\((\w+)\)", rows, re.MULTILINE)
    return [TYPES.get(name, name) for name in names]


def main():
    types = model_types()
    shared = {}
    for module in SHARED:
        shared.update(definitions(module))
    out = HEAD.format(version=transformers.__version__, rows=len(types) + len(QUANTIZATIONS))
    for one in types:
        read = [attributes_of(other, shared) for other in [one, *OTHERS.get(one, [])]]
        out += row(one, set().union(*read))
    for method, quantization in QUANTIZATIONS.items():
        out += row(method, arguments_of(quantization))
    print(out + END, end="")


if __name__ == "__main__":
    main()
