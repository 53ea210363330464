"""What to redact, and by what."""

from __future__ import annotations

from megalite.config.schema import Section


class PrivacyConfig(Section):
    """What stands in the place of each kind of personal data and secret; null leaves the kind alone.

    A replacement may be a mark (`<EMAIL>`), a fixed fake (`firstname.lastname@example.com`), or empty.
    """

    email: str | None = "<EMAIL>"
    """E-mail addresses. Those under example.com and the other names reserved for examples stay."""
    ip_address: str | None = "<IP_ADDRESS>"
    """IPv4 and IPv6 addresses. Those that look like version numbers stay."""
    private_ip_addresses: bool = False
    """Redact addresses too that are nobody's: loopback, private networks, examples."""
    phone: str | None = "<PHONE>"
    """Telephone numbers: international ones with a plus sign, and common national forms of North America, the United
    Kingdom, France, Germany, Australia and Japan. Plain runs of digits stay."""
    iban: str | None = "<IBAN>"
    """Bank accounts: IBANs of the country's length whose check digits are right."""
    card: str | None = "<CARD>"
    """Payment cards: known prefix and length, and the check digit (Luhn) right."""
    us_ssn: str | None = None
    """US social security numbers that may be given out: 123-45-6789, and 123 45 6789 where `SSN` or `social security`
    stands before it. Without a checksum, part numbers of the first form are taken too."""
    address: str | None = None
    """Postal addresses as they are written in the United States, the United Kingdom and Germany: a house or a box, with
    its street, and what follows of town and postcode. By rules: docs/data.md says how many they find and miss."""
    name: str | None = None
    """Names of persons: a common given name with a surname, or what a title or a greeting introduces. By lists, which
    miss many and take the famous too: docs/data.md says how many."""
    api_key: str | None = "<API_KEY>"
    """Keys with a well-known prefix: AWS, GitHub, GitLab, Slack, OpenAI, Anthropic, Hugging Face, Google, Stripe, npm,
    PyPI; and AWS secret keys by the name they are assigned to."""
    jwt: str | None = "<JWT>"
    """JSON web tokens."""
    private_key: str | None = "<PRIVATE_KEY>"
    """PEM blocks of private keys, with their first and last line."""
    password: str | None = None
    """Values assigned to a name that ends in password, secret, token, api_key and the like. Catches what has no form of
    its own, and now and then a harmless value."""
