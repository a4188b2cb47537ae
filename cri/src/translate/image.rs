//! `ImageSpec` and the record's form of it.

use state::container::ContainerImage;
use state::image::ImageConfig;
use state::pull::Auth;

use crate::runtime::v1;

/// What a request says about an image; `id` is what it was resolved to.
pub(crate) fn from_proto(from: &v1::ImageSpec, id: String) -> ContainerImage {
    ContainerImage {
        requested: from.image.clone(),
        user_specified: from.user_specified_image.clone(),
        annotations: from.annotations.clone(),
        runtime_handler: from.runtime_handler.clone(),
        id,
    }
}

/// The image as requested, with `image_ref` the id that it was resolved to.
pub(crate) fn to_proto(from: &ContainerImage) -> v1::ImageSpec {
    v1::ImageSpec {
        image: from.requested.clone(),
        annotations: from.annotations.clone(),
        user_specified_image: from.user_specified.clone(),
        runtime_handler: from.runtime_handler.clone(),
        image_ref: from.id.clone(),
    }
}

/// What a pull may show to the registry.
pub(crate) fn credential(from: v1::AuthConfig) -> Auth {
    Auth {
        source: "the request".to_owned(),
        username: from.username,
        password: from.password,
        auth: from.auth,
        server_address: from.server_address,
        identity_token: from.identity_token,
        registry_token: from.registry_token,
    }
}

/// `Image.uid` and `Image.username`: the part of the configuration's user before the colon.
pub(crate) fn user(config: &ImageConfig) -> (Option<v1::Int64Value>, String) {
    let user = config.user.split(':').next().unwrap_or_default();
    match user.parse::<i64>() {
        Ok(value) => (Some(v1::Int64Value { value }), String::new()),
        Err(_) => (None, user.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_is_number_or_name() {
        for (text, uid, name) in [
            ("", None, ""),
            ("0", Some(0), ""),
            ("1000:5", Some(1000), ""),
            ("web:web", None, "web"),
        ] {
            let config = ImageConfig {
                user: text.into(),
                ..ImageConfig::default()
            };
            let (number, username) = user(&config);
            assert_eq!((number.map(|v| v.value), username.as_str()), (uid, name), "{text}");
        }
    }
}
