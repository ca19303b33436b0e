"""Documents of rows: token ids, and for each token whether it is trained on as a target."""

import re

from preparing.inputs import row_of
from preparing.replies import Replies, SpecialTokens
from preparing.report import Notes, Refusal, one_line, reason_of
from preparing.rows import Text, common_prefix, example_of, pair_of
from preparing.templates import ChatTemplate

SURROGATE = re.compile("[\ud800-\udfff]")


class Preparer:
    """Makes documents of rows with a tokenizer of transformers. `mask` selects what is trained on:
    "assistant", all replies of the assistant; "completion", the completion or the last reply;
    "none", everything. Plain texts are always trained on as a whole, replies with weight 0
    never."""

    def __init__(self, tokenizer, mask, pairs=False):
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._special = SpecialTokens(tokenizer)
        self._pairs = pairs
        self._mask = mask
        self.notes = Notes()

    def documents(self, row):
        """The documents of a row, which is a JSON text or a dict."""
        return self.pair(row) if self._pairs else [self.document(row)]

    def pair(self, row):
        """Token ids and masks of the chosen and the rejected completion. As in TRL's DPOTrainer, a
        completion begins where its tokens and those of the prompt alone first differ."""
        prompt, chosen, rejected = pair_of(row_of(row), self.notes)
        if isinstance(prompt, str):
            chosen, rejected = (self._text(prompt + text)[0] for text in (chosen, rejected))
            prompt, _ = self._tokenize(prompt, special=True)
        else:
            prompt, chosen, rejected = self._chat_pair(prompt, chosen, rejected)
        known = min(common_prefix(prompt, chosen), common_prefix(prompt, rejected))
        made = [(ids, [0] * known + [1] * (len(ids) - known)) for ids in (chosen, rejected)]
        if any(not any(mask[1:]) for _, mask in made):
            raise Refusal("a completion has nothing to train on: no token after the prompt")
        return made

    def _chat_pair(self, prompt, chosen, rejected):
        if not self._template.exists():
            raise Refusal("the tokenizer has no chat template; give 'prompt', 'chosen' and 'rejected' "
                          "as texts")
        texts = []
        for chat in (chosen, rejected):
            self._template.check(chat, self.notes)
            form, text = self._template.form_of(chat)
            self._template.refuse_lost_calls(chat, form)
            self._template.note_left_out(chat, form, text, self.notes)
            texts.append(text)
        texts.insert(0, self._template.render(prompt, form(prompt.messages), prompt=True))
        return (self._tokenize(text, special=False)[0] for text in texts)

    def document(self, row):
        """Token ids and mask of a row."""
        example = example_of(row_of(row), self.notes)
        if isinstance(example, Text):
            ids, mask = self._text(example.text, example.prompt)
        else:
            ids, mask = self._conversation(example)
        if not any(mask[1:]):
            raise Refusal(f"has nothing to train on: {self._reason_for_nothing(example)}")
        return ids, mask

    def _reason_for_nothing(self, example):
        if isinstance(example, Text):
            return "fewer than two tokens"
        if self._mask != "none":
            roles = dict.fromkeys(message["role"] for message in example.messages)
            if "assistant" not in roles:
                return f"no reply of the assistant (the roles are {one_line(', '.join(roles))})"
            if False in example.conversation.trained:
                return "its replies have the weight 0"
        return "no reply of the assistant, or fewer than two tokens"

    def _text(self, text, prompt=0):
        """A text whose first `prompt` characters are not trained on."""
        ids, offsets = self._tokenize(text, special=True)
        end = self._tokenizer.eos_token_id
        if end is None:
            raise Refusal("the tokenizer has no end-of-sequence token")
        if not ids or ids[-1] != end:
            ids, offsets = ids + [end], offsets + [(len(text), len(text))]
        if self._mask == "none" or prompt == 0:
            return ids, [1] * len(ids)
        # A token that straddles the end of the prompt is trained on.
        return ids, [int(last > prompt) for _, last in offsets[:-1]] + [1]

    def _conversation(self, chat):
        if not self._template.exists():
            raise Refusal("the tokenizer has no chat template; give 'text', or texts as 'prompt' "
                          "and 'completion'")
        self._template.check(chat, self.notes)
        form, whole = self._template.form_of(chat)
        self._template.refuse_lost_calls(chat, form)
        self._template.note_left_out(chat, form, whole, self.notes)
        replies = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        untrained = [i for i in replies if chat.conversation.trained[i] is False]
        if self._mask == "none":
            return self._without(chat, form, whole, untrained)
        if self._template.marks_replies(chat.tools) and self._mask == "assistant" and chat.known == 0:
            return self._marked(chat, form, whole, replies, untrained)
        replies = [i for i in replies if i >= chat.known]
        if self._mask == "completion" and chat.known == 0:
            replies = replies[-1:]
        replies = [i for i in replies if i not in untrained]
        return self._masked(whole, self._ranges(chat, form, whole, replies))

    def _ranges(self, chat, form, whole, indices):
        def render(messages, prompt):
            return self._template.render(chat, form(messages), prompt)
        replies = Replies(render, chat.messages, whole, self._special)
        ranges = replies.ranges(indices)
        for text in sorted(replies.without):
            self.notes.add("replies follow a generation prompt without its end", one_line(repr(text)))
        return ranges

    def _masked(self, whole, ranges):
        """All tokens of a text. Those that overlap one of the ranges are trained on."""
        ids, offsets = self._tokenize(whole, special=False)
        mask = [0] * len(ids)
        at = 0
        for start, end in ranges:
            while at < len(ids) and offsets[at][1] <= start:
                at += 1
            while at < len(ids) and offsets[at][0] < end:
                mask[at] = int(offsets[at][1] > offsets[at][0])
                at += 1
        return ids, mask

    def _without(self, chat, form, whole, untrained):
        """Trains on everything except some replies."""
        ranges = self._ranges(chat, form, whole, untrained) if untrained else []
        ids, left_out = self._masked(whole, ranges)
        return ids, [1 - bit for bit in left_out]

    def _marked(self, chat, form, whole, replies, untrained):
        """The template marks the replies itself. Each reply that is not trained on is a run of
        marked tokens."""
        ids, mask = self._template.marked(chat, form(chat.messages))
        if not untrained:
            return ids, mask
        trained = [i for i in replies if i not in untrained]
        others, left_out = (self._masked(whole, self._ranges(chat, form, whole, indices))[1]
                            for indices in (trained, untrained))
        if len(left_out) != len(ids):
            raise Refusal("the tokens that the chat template marks are not those of its text")
        start = 0
        while start < len(ids):
            end = start + 1
            while end < len(ids) and mask[end] == mask[start]:
                end += 1
            if mask[start] and any(left_out[start:end]):
                if any(others[start:end]):
                    raise Refusal("a reply of weight 0 cannot be separated from the next one in what the "
                                  "chat template marks with {% generation %}")
                mask[start:end] = [0] * (end - start)
            start = end
        return ids, mask

    def _tokenize(self, text, special):
        surrogate = SURROGATE.search(text)
        if surrogate:
            raise Refusal(f"has a lone surrogate, \\u{ord(surrogate.group()):04x}, which is not a "
                          f"character; remove it, or write the pair of which it is a half")
        try:
            made = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        except Exception as error:  # of many kinds
            raise Refusal(f"the tokenizer fails: {reason_of(error)}") from error
        return list(made["input_ids"]), [tuple(pair) for pair in made["offset_mapping"]]
