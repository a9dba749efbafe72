"""The vocabulary of `extract`: kinds of text, the fields in them, the values, the ways to ask.

A sentence holds `{field}` places; `NAMES` gives the keys under which a field may be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of text: any opening, then the other sentences in any order and number."""

    openings: tuple[str, ...]
    sentences: tuple[tuple[str, ...], ...]  # one of each group at most


KINDS: tuple[Kind, ...] = (
    Kind(
        (
            "{person} is {age} years old and lives in {city}.",
            "{person} ({age}) comes from {city}.",
            "Meet {person}, {age}, from {city}.",
            "{person} lives in {city}.",
            "My neighbour {person} turned {age} this year.",
        ),
        (
            (
                "{pron} works as a {job} at {company}.",
                "{pron} is a {job}.",
                "{company} hired {obj} as a {job}.",
            ),
            ("You can write to {email}.", "The e-mail address is {email}.", "Contact: {email}."),
            ("Call {phone} after six.", "The phone number is {phone}."),
            ("In the evening {pron_low} likes {hobby}.", "A favourite hobby is {hobby}."),
        ),
    ),
    Kind(
        (
            "{person} ordered {quantity} {product} from {company}.",
            "Order for {person}: {quantity} {product}.",
            "{company} sold {quantity} {product} to {person}.",
            "I bought {quantity} {product} at {company}.",
        ),
        (
            (
                "The total was {price} dollars.",
                "It cost ${price}.",
                "The price was ${price} in all.",
            ),
            ("It will be delivered to {city} on {date}.", "Delivery is on {date} in {city}."),
            ("The order number is {code}.", "Order {code} was confirmed.", "Reference: {code}."),
            ("{person} paid by {payment}.", "Payment was made by {payment}."),
        ),
    ),
    Kind(
        (
            "The {event} takes place in {city} on {date}.",
            "Join us for the {event} on {date} in {city}.",
            "On {date}, {city} hosts the {event}.",
            "The {event} is on {date}.",
        ),
        (
            ("It starts at {time}.", "Doors open at {time}.", "Be there at {time}."),
            (
                "{person} will give the opening speech.",
                "The host is {person}.",
                "The main speaker is {person}.",
            ),
            ("Tickets cost {price} dollars.", "A ticket is ${price}."),
            ("{company} is the sponsor.", "The event is sponsored by {company}."),
            ("About {quantity} guests are expected.", "There is room for {quantity} people."),
        ),
    ),
    Kind(
        (
            "{company} is looking for a {job} in {city}.",
            "We need a {job} for our office in {city}.",
            "Job offer: {job} at {company}.",
            "Our {city} team wants to hire a {job}.",
        ),
        (
            ("The salary is ${price} a month.", "We pay {price} dollars a month."),
            (
                "Apply before {date}.",
                "The last day to apply is {date}.",
                "The job starts on {date}.",
            ),
            ("Send your application to {email}.", "Write to {email}."),
            ("Your manager would be {person}.", "Ask for {person} if you have questions."),
        ),
    ),
    Kind(
        (
            "{person} flies from {city} to {city2} on {date}.",
            "Flight {code} goes from {city} to {city2}.",
            "The train from {city} to {city2} leaves on {date}.",
            "{person} travels to {city2} from {city}.",
        ),
        (
            ("Departure is at {time}.", "It leaves at {time}.", "Boarding begins at {time}."),
            ("The fare is ${price}.", "The ticket costs {price} dollars."),
            ("The seat is {seat}.", "{pron} sits in seat {seat}."),
            ("The trip was booked through {company}.", "{company} runs the service."),
        ),
    ),
    Kind(
        (
            "{person} gave the {product} {rating} stars.",
            "Review by {person}: {rating} out of 5 for the {product}.",
            "I rate the {product} from {company} {rating} of 5.",
            "The {product} got {rating} stars.",
        ),
        (
            ("It was bought in {city} on {date}.", "The purchase was made on {date}."),
            ("It cost ${price}.", "The price of {price} dollars is fair."),
            ("{person} uses it for {hobby}.", "It is perfect for {hobby}."),
            ("The maker is {company}.", "It is made by {company}."),
        ),
    ),
    Kind(
        (
            "{person} has an appointment on {date} at {time}.",
            "Reminder for {person}: see you on {date} at {time}.",
            "The meeting with {person} is at {time} on {date}.",
            "Please come to {company} at {time} on {date}.",
        ),
        (
            (
                "The address is {street} in {city}.",
                "Our office is at {street}, {city}.",
                "Go to {street}.",
            ),
            ("If you are late, call {phone}.", "Phone: {phone}."),
            ("Your {job} is waiting for you.", "You will meet a {job}."),
            ("The booking code is {code}.", "Please bring code {code}."),
        ),
    ),
    Kind(
        (
            "A flat in {city} with {rooms} rooms is for rent.",
            "For sale: a house with {rooms} rooms in {city}.",
            "{person} rents out a flat with {rooms} rooms in {city}.",
            "The house at {street} has {rooms} rooms.",
        ),
        (
            ("The rent is ${price} a month.", "The price is {price} dollars."),
            ("It is free from {date}.", "You can move in on {date}."),
            ("The address is {street}.", "You find it at {street}."),
            ("Call {person} at {phone}.", "The owner, {person}, answers at {phone}."),
            ("{company} manages the building.", "The agent is {company}."),
        ),
    ),
)

# The keys under which a field may be asked for; the first is the usual one.
NAMES: dict[str, tuple[str, ...]] = {
    "person": ("name", "name", "person", "full_name", "customer"),
    "age": ("age",),
    "city": ("city", "city", "town", "location", "place"),
    "job": ("job", "profession", "occupation"),
    "company": ("company", "business", "organization"),
    "email": ("email", "email_address"),
    "phone": ("phone", "phone_number"),
    "hobby": ("hobby", "activity"),
    "quantity": ("quantity", "number", "count"),
    "product": ("product", "item"),
    "price": ("price", "amount", "cost"),
    "date": ("date", "day"),
    "code": ("code", "reference", "id"),
    "payment": ("payment", "payment_method"),
    "event": ("event", "title"),
    "time": ("time", "hour"),
    "city2": ("destination", "to"),
    "seat": ("seat",),
    "rating": ("rating", "stars"),
    "street": ("street", "address"),
    "rooms": ("rooms", "number_of_rooms"),
}
ORIGIN_NAMES = ("origin", "from", "departure_city")  # of `city` where the text has a `city2`

REQUESTS = (
    "Extract {keys} as JSON.\n\nText: {text}",
    "Extract {keys} from the text as JSON.\n\n{text}",
    "Return a JSON object with the keys {keys}.\n\nText: {text}",
    "Extract a JSON object with {keys}.\nText: {text}",
    "Read the text and answer with JSON. Keys: {keys}.\n\n{text}",
    "{text}\n\nGive me {keys} as a JSON object.",
    "Extract {keys} as JSON: {text}",
    "Text: {text}\n\nJSON with the keys {keys}:",
    "Find {keys} in this text and write them as JSON.\n\n{text}",
    "Keys: {keys}\nText: {text}\nJSON:",
)

FIRST_NAMES = (
    "Anna, Omar, Maria, John, Wei, Elena, David, Aisha, Lucas, Nina, Pedro, Sara, Tom, Yuki, "
    "Ivan, Clara, Ahmed, Julia, Marco, Leila, Peter, Ingrid, Carlos, Mei, Paul, Fatima, Erik, "
    "Rosa, James, Olga, Hassan, Emma, Luca, Priya, Daniel, Sofia, Karl, Amina, Diego, Hannah, "
    "Victor, Zoe, Samuel, Lena, Raj, Alice, Bruno, Greta, Oscar, Naomi, Felix, Irene, Hugo, "
    "Tanya, George, Bianca, Simon, Layla, Martin, Eva, Noah, Ruth, Adam, Chloe, Jonas, Miriam, "
    "Kofi, Helen, Stefan, Laura, Musa, Paula, Henry, Dora, Arjun, Vera"
)
LAST_NAMES = (
    "Keller, Haddad, Silva, Baker, Chen, Popova, Cohen, Khan, Berg, Alves, Lindt, Fisher, "
    "Tanaka, Novak, Jones, Rossi, Moreau, Schmidt, Garcia, Okafor, Larsen, Weber, Patel, Kim, "
    "Nguyen, Murphy, Costa, Ivanov, Smith, Dubois, Eriksson, Fontana, Gupta, Hansen, Ito, "
    "Jansen, Kovacs, Lopez, Meyer, Nowak, Olsen, Park, Quinn, Romano, Sato, Torres, Ueda, "
    "Vogel, Walker, Young, Zimmer, Adler, Bianchi, Cruz, Diaz, Evans, Ferrari, Gomez, Hill, "
    "Jensen, Klein, Lang, Marino, Nielsen, Ortiz, Perez, Reyes, Santos, Turner, Wolf"
)
CITIES = (
    "Berlin, Paris, London, Madrid, Rome, Oslo, Vienna, Tokyo, Boston, Chicago, Lisbon, "
    "Prague, Dublin, Cairo, Hamburg, Lyon, Leeds, Seville, Milan, Bergen, Graz, Osaka, Denver, "
    "Dallas, Porto, Brno, Cork, Munich, Nice, Bristol, Valencia, Turin, Geneva, Zurich, Kyoto, "
    "Austin, Seattle, Athens, Warsaw, Krakow, Stockholm, Helsinki, Copenhagen, Brussels, "
    "Ghent, Utrecht, Nairobi, Lagos, Mumbai, Delhi, Seoul, Sydney, Toronto, Montreal, Lima, "
    "Bogota, Santiago, Quito, Havana, Tunis, Rabat, Ankara, Tallinn, Riga, Sofia"
)
JOBS = (
    "teacher, nurse, baker, pilot, lawyer, carpenter, plumber, journalist, chef, engineer, "
    "gardener, judge, dentist, tailor, chemist, photographer, architect, translator, "
    "programmer, accountant, waiter, driver, librarian, data analyst, project manager, sales "
    "manager, graphic designer, electrician, mechanic, doctor"
)
COMPANY_STARTS = (
    "Blue, Nord, Sun, Green, Iron, Silver, Red, Star, Stone, River, Cloud, Bright, North, "
    "Alpha, Delta, Wind, Sea, Golden, Fox, Eagle, Maple, Oak, Crystal, Urban, Prime"
)
COMPANY_ENDS = (
    "wave Labs, field Foods, line Travel, bridge Books, gate Systems, peak Sports, light "
    "Energy, works, port Logistics, house Media, tech, leaf Market, point Bank, yard Motors, "
    "craft Studio"
)
PRODUCTS = (
    "lamps, chairs, notebooks, backpacks, headphones, keyboards, mugs, bicycles, jackets, "
    "candles, blankets, pens, tables, cameras, watches, tents, kettles, scarves, guitars, "
    "plants, pillows, helmets, clocks, bags"
)
ADJECTIVES = (
    "red, blue, wooden, small, leather, green, large, silver, black, vintage, white, folding"
)
EVENTS = (
    "Jazz Night, Book Fair, Spring Festival, Tech Summit, City Marathon, Wine Tasting, Film "
    "Week, Art Market, Science Day, Chess Open, Winter Ball, Food Festival, Poetry Evening, "
    "Startup Forum, Garden Show"
)
HOBBIES = (
    "hiking, chess, painting, fishing, cooking, cycling, reading, gardening, sailing, dancing, "
    "knitting, swimming, photography, running, camping, skiing, pottery, singing, climbing, "
    "travelling"
)
STREETS = (
    "Oak, Mill, Church, Garden, River, Hill, Station, Park, Bridge, Castle, Maple, "
    "School, Forest, Queen, Lake"
)
MONTHS = (
    "January, February, March, April, May, June, "
    "July, August, September, October, November, December"
)
PAYMENTS = "credit card, bank transfer, cash, PayPal, debit card, check, gift card, invoice"
