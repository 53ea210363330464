"""Words that tell names and addresses: given names, titles, what is no surname, kinds of streets."""

from __future__ import annotations

_GIVEN = """
Aaron Abdul Abdullah Abigail Adam Adrian Agnes Ahmed Aisha Alan Albert Alejandro Alessandro Alexander Alexandra Alfred
Alice Alicia Alison Amanda Amber Amelia Amit Amy Ana Anastasia Andrea Andreas Andrew Andrei Angela Anita Anja Ann Anna
Anne Annette Anthony Antoine Antonio Arjun Arthur Ashley Astrid Audrey Barbara Beatrice Benedikt Benjamin Bernard Bernd
Beth Betty Beverly Birgit Bjorn Bob Boris Bradley Brandon Brenda Brian Bridget Bruce Bryan Camille Carl Carla Carlos
Carmen Carol Caroline Carolyn Catherine Cecilia Charles Charlie Cheryl Chloe Chris Christian Christina Christine
Christoph Christopher Cindy Claire Clara Claudia Colin Connor Craig Cynthia Daniel Daniela Danielle Darren David Deborah
Debra Deepak Denise Dennis Derek Diana Diane Diego Dieter Dietmar Dimitri Dirk Dmitri Dominic Donald Donna Dorothy
Douglas Duncan Dylan Edith Eduardo Edward Edwin Eileen Elaine Eleanor Elena Eleni Elisabeth Elizabeth Ella Ellen Emily
Emma Enrique Eric Erica Erik Erika Esther Ethan Eugene Eva Evelyn Fabian Fatima Felix Fernando Fiona Florian Frances
Francesca Francesco Francis Francisco Franz Fred Frederick Friedrich Fritz Gabriel Gareth Gary Gavin Geoffrey Georg
George Gerald Gerd Gerhard Giovanni Giulia Giuseppe Gloria Gordon Graham Greg Gregory Greta Guillaume Gunther Gustav
Guy Hans Harold Harry Hassan Heather Heidi Heike Heinrich Heinz Helen Helena Helga Helmut Henri Henry Herbert Hermann
Hiroshi Holger Holly Horst Howard Hugh Hugo Ian Ibrahim Igor Ines Ingrid Irene Isaac Isabel Isabella Ivan Jack Jackie
Jacob Jacqueline Jacques Jakob James Jamie Jan Jana Jane Janet Janice Jason Javier Jean Jeff Jeffrey Jennifer Jens
Jeremy Jerry Jesse Jessica Jill Jim Joachim Joan Joanna Joe Joel Johann Johanna Johannes John Johnny Jonas Jonathan
Jorge Jose Josef Joseph Joshua Juan Judith Judy Julia Julian Julie Juliette Karen Karin Karl Kate Katharina Katherine
Kathleen Kathryn Katie Katrin Kazuo Keith Kelly Kenneth Kenji Kerstin Kevin Khalid Kimberly Klaus Konrad Kristen Kurt
Kyle Lars Laura Lauren Lawrence Leah Leila Lena Leon Leonard Leonardo Leroy Leslie Liam Linda Lisa Louise Luca Lucas
Lucia Lucy Ludwig Luis Luisa Lukas Lydia Lynn Magdalena Manfred Manuel Marc Marcel Marco Marcus Margaret Margarita Maria
Marianne Marie Marina Mario Marion Marjorie Markus Marlene Martha Martin Martina Mary Mateo Mathilde Matteo Matthew
Matthias Maureen Maurice Maximilian Megan Melanie Melissa Mia Michael Michele Michelle Miguel Mikhail Miriam Mohamed
Mohammad Mohammed Monica Monika Muhammad Nadia Nancy Naomi Natalia Natalie Natasha Nathan Neil Nicholas Nicola Nicolas
Nicole Nigel Nikolai Nikolaus Nina Noah Nora Norbert Norman Olga Oliver Olivia Omar Oscar Otto Pablo Pamela Paola
Patricia Patrick Paul Paula Pauline Pedro Peggy Peter Petra Philip Philipp Philippe Phillip Phyllis Pierre Piotr Priya
Rachel Rafael Rainer Rajesh Ralf Ralph Ramesh Ramona Raymond Rebecca Regina Reinhard Renate Richard Rita Robert Roberta
Roberto Robin Roger Roland Rolf Ronald Rosa Rosemary Roy Rudolf Russell Ruth Ryan Sabine Sally Samantha Samuel Sandra
Sanjay Sarah Sara Scott Sean Sebastian Sergei Sergey Sergio Shannon Sharon Shirley Siegfried Sigrid Silvia Simon Sofia
Sonia Sophia Sophie Stefan Stefanie Stella Stephan Stephanie Stephen Steve Steven Stuart Sunil Susan Susanne Suzanne
Sven Svetlana Sylvia Takeshi Tamara Tanja Tanya Tara Ted Teresa Terry Theodor Theodore Theresa Thomas Thorsten Tim
Timothy Tina Tobias Todd Tom Tony Tracy Trevor Ulrich Ulrike Ursula Uwe Valentina Valerie Vanessa Vera Veronica Victor
Victoria Vijay Vincent Vivian Vladimir Volker Walter Wanda Wayne Wendy Werner Wilhelm William Wolfgang Yasmin Yolanda
Yuki Yusuf Yvonne Zachary Zoe
Aurélie Benoît Chloé Céline Eléonore Frédéric François Françoise Geneviève Hélène Irène Jérôme Léa Noël René Sébastien
Thérèse Valérie Zoé Andrés Ángel Álvaro Héctor Inés Jesús José María Martín Óscar Raúl Sofía Tomás Víctor Jörg Jürgen
Günter Günther Götz Käthe Lüder Björn Sören Søren Jørgen Åsa João Conceição
"""

GIVEN_NAMES = frozenset(_GIVEN.encode().split())
"""Common in English, German, French, Spanish, Italian, Russian, Arabic, Indian and Japanese texts. Those
that are words, months or places too (Will, May, Paris) are left out."""

_NO_SURNAMES = """
A About After All Also Am An And Are As At Be Because Before But By Can Co Corp Did Do Does Dr For From Had Has Have He
Her His How I If In Inc Is It Its Ltd Mr Mrs Ms My No Not Of On Or Our Said Says She So The Their Then They This To Too
Was We Were What When Where Which While Who Why Will With Would Yes You Your GmbH LLC PLC
Monday Tuesday Wednesday Thursday Friday Saturday Sunday January February March April May June July August September
October November December Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec
Academy Act Airport Arena Association Avenue Award Awards Bay Beach Boulevard Bridge Building Bureau Castle Cathedral
Center Centre Chapel Chapter Church City Class Clinic Club College Company Conference County Court Cove Creek Cup Day
Department Drive Elementary Enterprises Equation Festival Foundation Function Gallery Garden Gardens Group Hall High
Hospital Hotel House Industries Initiative Institute International Island Islands Lake Lane Law Lecture Library License
Medal Memorial Middle Mine Motors Mountain Mountains Museum Music National Park Parkway Place Plaza Point Press Prize
Project Records Research Reserve Residence Ridge River Road School Science Sea Series Show Society Software Space
Springs Square Station Street Studio Studios Symphony System Systems Technologies Technology Temple Terrace Test Theater
Theatre Theorem Theory Tower Trail Transform Trust University Valley Village Way Web West East North South
Sir Madam Customer Customers Colleague Colleagues Friend Friends Editor Team Reader Readers All Everyone Applicant
Members Member Parents Students Valued Hiring Manager Committee Board God Lord Diary President Speaker Chairman
Minister Secretary Justice Chair Mayor Governor
der die das und ist war hat Straße Strasse Platz Weg Schule Kirche Gymnasium Institut Stiftung Preis Damen Herren
Kollegen Freunde
"""

NO_SURNAMES = frozenset(_NO_SURNAMES.encode().split())
"""Capitalised words that follow a given name, a title or a greeting and are no part of a person's name."""

TITLES = (
    *(b"mr", b"mrs", b"ms", b"miss", b"mx", b"dr", b"prof", b"professor", b"sir", b"dame", b"lady", b"herr", b"herrn"),
    *(b"frau", b"madame", b"mme", b"mlle", b"monsieur", b"signor", b"signora", b"judge", b"captain", b"sergeant"),
    *(b"officer", b"nurse", b"reverend", b"rev", b"senator", b"rabbi", b"pastor", b"coach", b"detective"),
)
"""Before a surname, with or without a full stop."""

INTRODUCTIONS = (
    *(b"my name is", b"name is", b"my name's", b"dear", b"hi", b"hello", b"mein name ist"),
    *(b"sincerely,", b"regards,", b"wishes,", b"yours,", b"thanks,", b"truly,", b"faithfully,", b"cheers,"),
    *(b"name:", b"patient:", b"contact:", b"employee:", b"applicant:", b"attn:", b"attention:", b"signed,", b"tenant:"),
)
"""What a person's name follows; two words are asked for, but behind `my name is` and a greeting."""

ONE_WORD_IS_ENOUGH = (b"my name is", b"my name's", b"dear", b"mein name ist")

PARTICLES = frozenset(b"von van de der den del della di da dos du la le el al bin ibn zu zum ten ter".split())
"""Small words inside of a surname."""

STREETS = (
    *("Street", "St", "Avenue", "Ave", "Road", "Rd", "Boulevard", "Blvd", "Lane", "Ln", "Drive", "Dr", "Court", "Ct"),
    *("Way", "Place", "Pl", "Square", "Sq", "Terrace", "Parkway", "Pkwy", "Circle", "Cir", "Highway", "Hwy", "Close"),
    *("Crescent", "Cres", "Gardens", "Mews", "Row", "Hill", "Grove", "Walk", "Trail", "Alley", "Quay", "Broadway"),
)
"""Last words of a street's name in the United States and the United Kingdom."""

GERMAN_STREETS = (
    *("straße", "strasse", "str.", "weg", "platz", "allee", "gasse", "damm", "ufer", "chaussee", "steig", "stieg"),
    *("promenade", "pfad", "markt"),
)
"""Ends of a street's name in Germany, Austria and Switzerland, in small letters.
`ring` is left out: Engineering 23."""

BOXES = (b"box", b"postfach")
"""Before the number of a post office box."""
