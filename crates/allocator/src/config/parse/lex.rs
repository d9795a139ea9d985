//! From text to items, with the place of each part.

use std::fmt;

use crate::config::{ConfigError, Expected, Place, excerpt};

/// A piece of the text between separators, or a separator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Token {
    /// Without whitespace; not empty.
    pub(super) text: String,
    pub(super) place: Place,
}

/// `name:value`.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) name: Token,
    pub(super) value: Value,
}

/// What an option is set to.
#[derive(Debug)]
pub(super) enum Value {
    One(Token),
    /// `[key:value,key:value]`
    List {
        /// Of the opening bracket.
        place: Place,
        pairs: Vec<(Token, Token)>,
    },
}

impl Value {
    pub(super) const fn place(&self) -> Place {
        match self {
            Self::One(token) => token.place,
            Self::List { place, .. } => *place,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(token) => f.write_str(&token.text),
            Self::List { pairs, .. } => {
                f.write_str("[")?;
                for (i, (key, value)) in pairs.iter().enumerate() {
                    write!(f, "{}{}:{}", if i == 0 { "" } else { "," }, key.text, value.text)?;
                }
                f.write_str("]")
            }
        }
    }
}

/// All items of `text`; none when it is blank. One comma may follow the last item, and the last pair of a list.
pub(super) fn items(text: &str) -> Result<Vec<Item>, ConfigError> {
    let mut reader = Reader { tokens: tokens(text).into_iter().peekable(), end: text.len(), item: 1 };
    let mut items = Vec::new();
    while reader.tokens.peek().is_some() {
        let name = reader.word(Expected::Name)?;
        reader.separator(":", Expected::Colon)?;
        let value = match reader.next_if("[") {
            Some(bracket) => Value::List { place: bracket.place, pairs: reader.pairs()? },
            None => Value::One(reader.word(Expected::Value)?),
        };
        items.push(Item { name, value });
        if reader.tokens.peek().is_some() {
            reader.separator(",", Expected::CommaOrEnd)?;
        }
    }
    Ok(items)
}

struct Reader {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token>>,
    /// Bytes of the whole text.
    end: usize,
    /// The item of the last token taken.
    item: usize,
}

impl Reader {
    /// Takes the next token if it is this separator.
    fn next_if(&mut self, separator: &str) -> Option<Token> {
        self.tokens.next_if(|token| token.text == separator)
    }

    fn separator(&mut self, separator: &str, expected: Expected) -> Result<(), ConfigError> {
        match self.next_if(separator) {
            Some(token) => {
                self.item = token.place.item;
                Ok(())
            }
            None => Err(self.unexpected(expected)),
        }
    }

    /// Takes the next token, which must not be a separator.
    fn word(&mut self, expected: Expected) -> Result<Token, ConfigError> {
        match self.tokens.next_if(|token| !token.text.starts_with(is_separator)) {
            Some(token) => {
                self.item = token.place.item;
                Ok(token)
            }
            None => Err(self.unexpected(expected)),
        }
    }

    /// The rest of a list, and its closing bracket.
    fn pairs(&mut self) -> Result<Vec<(Token, Token)>, ConfigError> {
        let mut pairs = Vec::new();
        while self.next_if("]").is_none() {
            let key = self.word(Expected::PairOrBracket)?;
            self.separator(":", Expected::Colon)?;
            pairs.push((key, self.word(Expected::PairValue)?));
            if self.tokens.peek().is_some_and(|token| token.text == "]") {
                continue;
            }
            self.separator(",", Expected::CommaOrBracket)?;
        }
        Ok(pairs)
    }

    fn unexpected(&mut self, expected: Expected) -> ConfigError {
        match self.tokens.peek() {
            Some(token) => ConfigError::Syntax { place: token.place, expected, found: Some(excerpt(&token.text)) },
            None => ConfigError::Syntax { place: Place { offset: self.end, item: self.item }, expected, found: None },
        }
    }
}

const fn is_separator(c: char) -> bool {
    matches!(c, ',' | ':' | '[' | ']')
}

/// C's `isspace`; what else Unicode calls whitespace is part of a word, as it is for PyTorch.
const fn is_whitespace(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\x0b' | '\x0c' | '\r')
}

fn tokens(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut word: Option<Token> = None;
    let (mut item, mut in_list) = (1, false);
    for (offset, c) in text.char_indices() {
        let place = Place { offset, item };
        if is_separator(c) {
            tokens.extend(word.take());
            tokens.push(Token { text: c.into(), place });
            match c {
                '[' => in_list = true,
                ']' => in_list = false,
                ',' if !in_list => item += 1,
                _ => {}
            }
        } else if !is_whitespace(c) {
            word.get_or_insert_with(|| Token { text: String::new(), place }).text.push(c);
        }
    }
    tokens.extend(word);
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(text: &str) -> Vec<(String, usize, usize)> {
        tokens(text).into_iter().map(|t| (t.text, t.place.offset, t.place.item)).collect()
    }

    #[test]
    fn words_and_separators_have_places() {
        let expected = [("a", 1, 1), (":", 2, 1), ("[", 3, 1), ("é", 4, 1), (":", 6, 1), ("2", 7, 1), (",", 8, 1)];
        let rest = [("]", 9, 1), (",", 10, 1), ("b", 12, 2), (":", 13, 2), ("34", 14, 2)];
        let expected: Vec<_> =
            expected.iter().chain(&rest).map(|(text, offset, item)| ((*text).to_owned(), *offset, *item)).collect();
        assert_eq!(offsets(" a:[é:2,],\tb:3 4"), expected);
    }

    #[test]
    fn whitespace_is_that_of_c() {
        assert_eq!(tokens(" \t\n\x0b\x0c\r"), []);
        assert_eq!(tokens("a \u{a0}b")[0].text, "a\u{a0}b");
    }
}
