"""A tokenizer that replaces those of transformers, with the habits of many chat templates."""

import json
import re

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"]
THINK = len(SPECIAL)  # the id of <think>


class Added(str):
    special = False


class Tokenizer:
    """Special tokens, words with the space before them, and single characters."""
    eos_token, eos_token_id = "</s>", SPECIAL.index("</s>")
    all_special_tokens = SPECIAL
    added_tokens_decoder = {THINK: Added("<think>")}
    pattern = re.compile("|".join(map(re.escape, SPECIAL)) + r"| ?[a-z]+|.", re.DOTALL)

    def __init__(self, template="prefixes"):
        self.chat_template = template
        self.words = dict(enumerate(SPECIAL))  # by id

    def __call__(self, text, add_special_tokens, return_offsets_mapping):
        assert return_offsets_mapping
        ids, offsets = ([0], [(0, 0)]) if add_special_tokens else ([], [])
        for match in self.pattern.finditer(text):
            word = match.group()
            ids.append(SPECIAL.index(word) if word in SPECIAL
                       else THINK + sum(ord(c) * 31 ** i for i, c in enumerate(word)) % 60000)
            offsets.append(match.span())
            self.words[ids[-1]] = word
        return {"input_ids": ids, "offset_mapping": offsets}

    def apply_chat_template(self, messages, tools=None, tokenize=False, add_generation_prompt=False,
                            return_dict=False, return_assistant_tokens_mask=False, **variables):
        if "alternating" in self.chat_template:
            for message, role in zip(messages, ["user", "assistant"] * len(messages)):
                if message["role"] != role:
                    raise ValueError("roles must\nalternate")
        if "needs users" in self.chat_template and all(m["role"] != "user" for m in messages):
            raise ValueError("no user")
        text = "" if "no begin" in self.chat_template else "<s>"
        text += f"[{len(tools)}{tools}]" if tools else ""
        text += "".join(f"({value})" for value in variables.values())
        spans = []
        for i, message in enumerate(messages):
            last = i + 1 == len(messages)
            start = len(text) + len(f"<|{message['role']}|>\n")
            text += f"<|{message['role']}|>\n{self.spoken(message, last)}"
            if message["role"] == "assistant":
                spans.append((start, len(text)))
            if "last ends" in self.chat_template and last and not add_generation_prompt:
                text += "<s>"
            elif "between" in self.chat_template:
                text += "" if last and not add_generation_prompt else "</s>"
            elif "unmarked" not in self.chat_template:
                text += "<|end|>\n"
        if add_generation_prompt:
            text += "<|assistant|>\n"
            text += "<think>\n" if "prompts thoughts" in self.chat_template else ""
        elif "closed" in self.chat_template:
            text += "</s>"
        if not tokenize:
            return text
        made = self(text, False, True)
        return {"input_ids": made["input_ids"],
                "assistant_masks": [int(any(a <= start and end <= b for a, b in spans))
                                    for start, end in made["offset_mapping"]]}

    def spoken(self, message, last):
        content = message.get("content", "")
        if "parts" in self.chat_template:
            content = "" if isinstance(content, str) else "".join(part["text"] for part in content)
        if "forgets" in self.chat_template and message["role"] == "assistant" and not last:
            content = "yes"
        if "loud" in self.chat_template and content.endswith("!"):
            content = "(loud)" + content
        if "thoughts" in self.chat_template and message["role"] == "assistant":
            # Earlier replies lose their thoughts; with "no thoughts" all replies do. With "empty thoughts"
            # an empty one replaces them.
            if "empty thoughts" in self.chat_template:
                thought, _, content = content.rpartition("</think>")
                thought = thought.removeprefix("<think>") if last else ""
                content = f"<think>\n{thought}\n</think>\n\n{content}"
            elif not last or "no thoughts" in self.chat_template:
                content = content.split("</think>")[-1].strip()
            elif "</think>" not in content:
                content = "<think></think>" + content
        for call in message.get("tool_calls", [])[:1]:
            function = call["function"]
            if "object arguments" in self.chat_template and isinstance(function["arguments"], str):
                raise TypeError("arguments")
            content += f"<{function['name']} {json.dumps(function['arguments'])}>"
        return content


def chat(*contents):
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": role, "content": content}
                         for role, content in zip(roles, contents)]}
