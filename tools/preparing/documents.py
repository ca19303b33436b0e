"""Documents of rows: token ids, and for each token whether it is trained on as a target."""

import re

from .inputs import row_of
from .replies import Replies
from .report import Notes, Refusal, one_line, reason_of
from .rows import Text, common_prefix, example_of, pair_of
from .stops import SpecialTokens, StopTokens
from .templates import ChatTemplate
from .thoughts import after_empty_thought, has_empty_thought

BEGIN = "documents begin with"
SURROGATE = re.compile("[\ud800-\udfff]")


class Preparer:
    """Makes documents of rows with a tokenizer of transformers. `mask` selects what is trained on:
    "assistant", all replies of the assistant; "completion", the completion or the last reply;
    "none", everything. Plain texts are always trained on as a whole, replies with weight 0
    never."""

    def __init__(self, tokenizer, mask, pairs=False, stops=None):
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._special = SpecialTokens(tokenizer, stops)
        self._stops = StopTokens(tokenizer, self._special, stops)
        self._pairs = pairs
        self._mask = mask
        self._begins = None  # whether the tokenizer adds a beginning-of-sequence token
        self.notes = Notes()

    def documents(self, row):
        """The documents of a row, which is a JSON text or a dict."""
        return self.pair(row) if self._pairs else [self.document(row)]

    def pair(self, row):
        """Token ids and masks of the chosen and the rejected completion. As in TRL's DPOTrainer, a
        completion begins where its tokens and those of the prompt alone first differ."""
        prompt, *completions = pair_of(row_of(row), self.notes)
        if isinstance(prompt, str):
            completions = [(self._text(prompt + text)[0], [], "") for text in completions]
            prompt, _ = self._tokenize(prompt, special=True)
        else:
            prompt, completions = self._chat_pair(prompt, completions)
        known = min(common_prefix(prompt, ids) for ids, _, _ in completions)
        made = [_after_prompt(known, *completion) for completion in completions]
        if any(not any(mask[1:]) for _, mask in made):
            raise Refusal("a completion has nothing to train on: no token after the prompt")
        return made

    def _chat_pair(self, prompt, chats):
        """Tokens of the prompt, and tokens, offsets and text of each Chat."""
        if not self._template.exists():
            raise Refusal("the tokenizer has no chat template; give 'prompt', 'chosen' and 'rejected' "
                          "as texts")
        completions = []
        for chat in chats:
            form, text = self._rendered(chat)
            whole = self._replies(chat, form, text).whole
            self.notes.end_reply(self._special.at_end(whole.rstrip()))
            completions.append((*self._tokenize(whole, special=False), whole))
        asked = self._template.render(prompt, form(prompt.messages), prompt=True)
        return self._tokenize(asked, special=False)[0], completions

    def _rendered(self, chat):
        """The form of messages for the template, and the text that it writes for a Chat."""
        self._template.check(chat, self.notes)
        form, text = self._template.form_of(chat)
        self._template.refuse_lost_calls(chat, form)
        self._template.note_left_out(chat, form, text, self.notes)
        return form, text

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
        self._note_begin(ids, "the tokenizer adds it to texts that have it")
        if prompt > 0:
            self.notes.end_reply(getattr(self._tokenizer, "eos_token", None))
        if self._mask == "none" or prompt == 0:
            return ids, [1] * len(ids)
        # A token that straddles the end of the prompt is trained on.
        return ids, [int(last > prompt) for _, last in offsets[:-1]] + [1]

    def _conversation(self, chat):
        if not self._template.exists():
            raise Refusal("the tokenizer has no chat template; give 'text', or texts as 'prompt' "
                          "and 'completion'")
        form, text = self._rendered(chat)
        replies = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        untrained = [i for i in replies if chat.conversation.trained[i] is False]
        if self._mask == "none":
            made = self._without(self._replies(chat, form, text), untrained)
        elif self._template.marks_replies(chat.tools) and self._mask == "assistant" and chat.known == 0:
            made = self._marked(chat, form, text, replies, untrained)
        else:
            replies = [i for i in replies if i >= chat.known]
            if self._mask == "completion" and chat.known == 0:
                replies = replies[-1:]
            found = self._replies(chat, form, text)
            trained = [i for i in replies if i not in untrained]
            ranges = self._ranges(found, trained)
            for index, (start, end) in zip(trained, ranges):
                self.notes.end_reply(self._special.at_end(found.whole[start:end].rstrip()))
                if has_empty_thought(chat.messages[index].get("content", "")):
                    self.notes.add("not trained on", "empty thoughts at the beginning of replies")
            made = self._masked(found.whole, ranges)
        self._note_begin(made[0], "the chat template writes it twice")
        return made

    def _replies(self, chat, form, text):
        def render(messages, prompt):
            return self._template.render(chat, form(messages), prompt)
        return Replies(render, chat.messages, text, self._template.habits(chat, form), self._special,
                       self._stops)

    def _ranges(self, replies, indices):
        ranges = replies.ranges(indices)
        for text in sorted(replies.without):
            self.notes.add("replies follow a generation prompt without its end", one_line(repr(text)))
        return ranges

    def _note_begin(self, ids, reason):
        """Notes a beginning-of-sequence token that the tokenizer adds to texts but the chat template
        does not write, or that is there twice."""
        begin = getattr(self._tokenizer, "bos_token_id", None)
        if begin is None or not ids:
            return
        name = f"'{one_line(self._tokenizer.bos_token)}'"
        if ids[:2] == [begin, begin]:
            self.notes.add(BEGIN, f"{name} twice, because {reason}")
        elif ids[0] != begin and self._adds_begin(begin):
            self.notes.add(BEGIN, f"no {name}, which the tokenizer adds to texts and the chat template "
                                  f"does not write")

    def _adds_begin(self, begin):
        if self._begins is None:
            self._begins = self._tokenize("a", special=True)[0][:1] == [begin]
        return self._begins

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

    def _without(self, replies, untrained):
        """Trains on everything except some replies."""
        ids, left_out = self._masked(replies.whole, self._ranges(replies, untrained))
        if not any(left_out[-1:]):
            self.notes.end_reply(self._special.at_end(replies.whole.rstrip()))
        return ids, [1 - bit for bit in left_out]

    def _marked(self, chat, form, text, replies, untrained):
        """The template marks the replies itself."""
        ids, mask = self._template.marked(chat, form(chat.messages))
        if untrained:
            trained = [i for i in replies if i not in untrained]
            found = self._replies(chat, form, text)
            mask = _without_replies(mask, *(self._masked(text, self._ranges(found, indices))[1]
                                            for indices in (trained, untrained)))
        same_ids, offsets = self._tokenize(text, special=False)
        if same_ids == ids:
            for start, end in _runs(mask):
                run = text[offsets[start][0]:offsets[end - 1][1]]
                self.notes.end_reply(self._special.at_end(run.rstrip()))
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


def _after_prompt(known, ids, offsets, text):
    """Token ids and mask of a completion that follows `known` tokens. An empty thought at its beginning
    is not trained on, if the offsets of its tokens are given."""
    begin = known
    if known < len(offsets):
        start = after_empty_thought(text, offsets[known][0], len(text))
        begin = next((at for at in range(known, len(ids)) if offsets[at][0] >= start), len(ids))
    return ids, [0] * begin + [1] * (len(ids) - begin)


def _runs(mask):
    """The places [start, end) of each run of ones."""
    bounds = [at for at, (last, bit) in enumerate(zip([0, *mask], [*mask, 0])) if last != bit]
    return list(zip(bounds[::2], bounds[1::2]))


def _without_replies(mask, others, left_out):
    """A mask whose runs are replies, without those that `left_out` marks. `others` marks the others."""
    if len(left_out) != len(mask):
        raise Refusal("the tokens that the chat template marks are not those of its text")
    made = list(mask)
    for start, end in _runs(mask):
        if any(left_out[start:end]):
            if any(others[start:end]):
                raise Refusal("a reply of weight 0 cannot be separated from the next one in what the "
                              "chat template marks with {% generation %}")
            made[start:end] = [0] * (end - start)
    return made
