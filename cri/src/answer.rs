//! The forms of answers: one message within the client's limit, a stream of them, or a refusal that names itself.

use std::pin::Pin;

use futures::Stream;
use prost::Message;
use tonic::{Response, Status};

use crate::error::{Error, Result};
use crate::server::MESSAGE_LIMIT;

/// Items of one streamed message at most.
const CHUNK: usize = 5000;
/// Bytes of one streamed message, about: far below the client's limit.
const CHUNK_BYTES: usize = MESSAGE_LIMIT / 4;

pub(crate) type Answer<T> = Result<Response<T>, Status>;
/// A stream of answers.
pub(crate) type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

pub(crate) fn answer<T>(result: Result<T>) -> Answer<T> {
    result.map(Response::new).map_err(Status::from)
}

/// UNIMPLEMENTED, which clients know how to do without.
pub(crate) fn unimplemented<T>(rpc: &'static str, why: &str) -> Answer<T> {
    let why = why.to_owned();
    Err(Error::Unimplemented { rpc, why }.into())
}

/// A whole answer, if the client can receive it.
pub(crate) fn bounded<T: Message>(what: &'static str, answer: T) -> Result<T> {
    let size = answer.encoded_len();
    if size > MESSAGE_LIMIT {
        return Err(Error::TooLarge {
            what,
            size,
            limit: MESSAGE_LIMIT,
            advice: "use the Stream form of the call, or a filter",
        });
    }
    Ok(answer)
}

/// The items in messages that any client can receive, each item once, then the end.
pub(crate) fn chunked<T, M, F>(items: Vec<T>, message: F) -> Answers<M>
where
    T: Message + 'static,
    M: Send + 'static,
    F: Fn(Vec<T>) -> M + Send + 'static,
{
    let mut items = items.into_iter().peekable();
    let next = move || {
        let mut chunk = Vec::new();
        let mut bytes = 0;
        while let Some(item) = items.next_if(|_| chunk.len() < CHUNK && bytes < CHUNK_BYTES) {
            bytes += item.encoded_len();
            chunk.push(item);
        }
        (!chunk.is_empty()).then(|| Ok(message(chunk)))
    };
    Box::pin(futures::stream::iter(std::iter::from_fn(next)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::v1;
    use futures::{StreamExt, executor::block_on};

    fn images(count: usize, bytes: usize) -> Vec<v1::Image> {
        let image = |n: usize| v1::Image {
            id: format!("{n}{}", "x".repeat(bytes)),
            ..v1::Image::default()
        };
        (0..count).map(image).collect()
    }

    fn sizes(items: Vec<v1::Image>) -> Vec<usize> {
        let stream = chunked(items, |images| v1::StreamImagesResponse { images });
        block_on(stream.map(|m| m.unwrap().images.len()).collect())
    }

    #[test]
    fn chunks_by_number_and_bytes() {
        assert!(sizes(images(0, 0)).is_empty());
        assert_eq!(sizes(images(5001, 0)), [5000, 1]);
        let large = sizes(images(10, MESSAGE_LIMIT / 3));
        assert_eq!(large, [1; 10]);
    }

    #[test]
    fn refuses_what_no_client_can_receive() {
        let images = images(4, MESSAGE_LIMIT / 3);
        let error = bounded("ListImages", v1::ListImagesResponse { images }).unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted);
    }
}
