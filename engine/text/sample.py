"""A text to try models with, in words that any of them has met: prose, dialogue, tables, code, other languages."""

TRIED_TOKENS, FIT_TOKENS = 256, 1024
"""Of the text: the first ones a KV cache's format is tried with, and to those behind them keys are fitted."""

SAMPLE = """\
A server for language models keeps, for every token it has read, a key and a value in each layer of the model. These \
are looked at again for every token that follows, so they cannot be thrown away while an answer is being written. \
Together they are called the cache, and its size, not the size of the model, decides how many people can be served at \
once. A conversation of a few thousand words may take hundreds of megabytes; a hundred such conversations take more \
than most machines have. That is why the cache is divided into pages of sixteen tokens, as paper was once folded into \
sheets of sixteen pages, and why each page is given to whoever needs it next.

The capital of France is Paris, which lies on the river Seine. In 1789 the people of the city stormed an old fortress \
called the Bastille; today there is a large square in its place, with a column, many cafés and a busy station below \
the ground. Trains leave for the suburbs every four minutes. On Sundays the market on the boulevard sells cheese, \
fish, olives, bread and flowers until about half past two in the afternoon.

Dear Ms Hartmann,

Thank you for your letter of 14 March. We have looked into the invoice (no. 2031-77) and found that 3 of the 12 boxes \
were counted twice. The difference of $148.50 will be paid back to your account within ten working days. Please \
accept our apologies, and let us know if anything else is unclear.

Yours sincerely,
The customer service team

Q: How do I make a simple tomato soup?
A: Cut two onions and fry them gently in olive oil. Add three cloves of garlic, a kilogram of ripe tomatoes and half \
a litre of water. Let everything cook for twenty-five minutes, then blend it, and season it with salt, pepper and a \
little sugar. Serve it with fresh basil. If you like it richer, stir in a spoonful of cream at the end.

def fibonacci(n: int) -> int:
    \"\"\"The n-th Fibonacci number; fibonacci(0) is 0.\"\"\"
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

{"model": "small", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 16, "temperature": \
0.0, "stream": true, "stop": ["\\n\\n", "END"]}

| planet | distance from the sun (million km) | moons | length of a day |
| --- | --- | --- | --- |
| Mercury | 57.9 | 0 | 4222.6 hours |
| Venus | 108.2 | 0 | 2802.0 hours |
| Earth | 149.6 | 1 | 24.0 hours |
| Mars | 227.9 | 2 | 24.7 hours |
| Jupiter | 778.6 | 95 | 9.9 hours |

"You are late," said the old woman without looking up from her book. "The boat left an hour ago."
"I know," said the boy. "I saw it from the hill. I was running, and then I wasn't running any more."
She closed the book and put it on the table beside the lamp. Outside, the wind had turned to the north, and the first \
drops of rain were falling on the roof. Neither of them said anything for a while. Then she smiled, got up, and took \
two cups from the shelf above the stove.

Die Hauptstadt von Deutschland ist Berlin. Die Stadt hat etwa 3,7 Millionen Einwohner und liegt an der Spree. Im \
Sommer sitzen viele Menschen abends am Wasser, im Winter in den Kneipen. Le train part de la gare à huit heures et \
quart; il arrive à Lyon avant midi. El perro duerme debajo de la mesa mientras los niños juegan en el jardín.

Water boils at 100 degrees Celsius at sea level, and at about 93 degrees on a mountain of 2,000 metres, because the \
air presses on it less. A gas that is heated in a closed vessel cannot grow, so its pressure rises instead: p V = n R \
T. Light travels 299,792,458 metres in a second; sound needs almost fifteen minutes for as many. The three laws of \
thermodynamics say, in short, that you cannot win, that you cannot break even, and that you cannot leave the game.

1. Open the settings and choose "Network".
2. Switch the wireless connection off, wait for ten seconds, and switch it on again.
3. If the connection is still slow, restart the router (the grey box with the two green lights).
4. Write down the number on its back and call us: 0800 555 0199, Monday to Friday, 8:00 to 18:30.

SELECT customers.name, COUNT(*) AS orders, SUM(orders.total) AS revenue
FROM customers JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2024-01-01' AND orders.status <> 'cancelled'
GROUP BY customers.name
HAVING COUNT(*) > 3
ORDER BY revenue DESC
LIMIT 20;

A page that many requests share is kept once. When one of them goes on in its own way, the page in which they part is \
copied first, and the copy is written; nobody else notices. When the memory is full, the page that nobody has looked \
at for the longest time is given up, and with it only what follows it. If even that does not help, the request that \
came last gives all its pages back and is computed again later. It keeps its place in the queue, and its answer does \
not change by a single letter, since the same tokens give the same numbers, whoever computes them and whenever.

<html>
<head><title>Opening hours</title></head>
<body>
  <h1>Opening hours</h1>
  <ul><li>Monday: closed</li><li>Tuesday to Friday: 9 am to 6 pm</li><li>Saturday: 10 am to 4 pm</li></ul>
  <p>Find us at <a href="https://example.com/map">12 Mill Lane</a>, behind the library.</p>
</body>
</html>

Once upon a time, in a village by the sea, there lived a clockmaker who could mend anything except his own clock. It \
had belonged to his grandfather, and it stood in the hall, and every night at ten minutes to twelve it stopped. He \
had taken it apart seven times. He had cleaned every wheel, he had replaced the spring, he had even moved it to \
another wall. In the morning it went again, as if nothing had happened. "Perhaps," said his daughter, who was nine, \
"it is only tired." So that evening they stayed up together, the two of them and the clock, and waited.

To compare two methods fairly, change one thing at a time, measure more than once, and write down what you did so \
that somebody else can do it again. A result that cannot be repeated is a story. A mean without its spread says \
little: four runs of 10, 10, 10 and 50 seconds have the same mean as four runs of 20, and nobody would call them \
alike. State what you expected before you look. If the numbers surprise you, suspect the measurement first, then the \
code, then the theory, and in the end be glad, because only surprises teach anything.

USER: my order still hasn't arrived :( it's been 3 weeks!!
AGENT: I'm sorry to hear that. Could you give me the order number, please? It begins with "AB-".
USER: AB-99213-x
AGENT: Thank you. I can see that it left our warehouse on the 2nd, but the parcel has been at the customs office \
since then. I'll send you a replacement today at no cost, and you can keep the first one if it turns up.
USER: oh wow thanks, that's really kind

x = 3, y = 4, so x^2 + y^2 = 9 + 16 = 25 and the distance is 5. If 2a + 6 = 20, then 2a = 14 and a = 7. The sum of \
the first n whole numbers is n(n + 1)/2; for n = 100 that is 5050. The probability that two dice show the same number \
is 6/36 = 1/6.

[2024-05-17 08:31:02] INFO  server started on port 8080 (pid 4117)
[2024-05-17 08:31:09] WARN  connection from 10.0.0.23 refused: no certificate
[2024-05-17 08:32:44] ERROR could not read /var/lib/data/index.bin: permission denied
[2024-05-17 08:32:44] INFO  trying again in 5 seconds (attempt 2 of 5)

The committee met on Tuesday and agreed on three points. First, the bridge will be closed for repairs between June \
and September, and buses will take the longer way past the hospital. Second, the school gets a new roof, paid for by \
the county and not, as had been feared, by the parents. Third, the question of the trees in Station Road is put off \
until the autumn, because the two reports on their health contradict each other. Mr Okafor asked that the minutes \
record his doubts about the second point; Ms Lindqvist asked that they record her joy.

In the beginning a language model knows nothing. It is shown a sentence, guesses the next word, and is told what it \
was; that is repeated some trillions of times. Nobody tells it what a verb is, or that Rome is in Italy, or how to \
count. All of this it has to find out, because knowing it makes the guesses better. What it has found out is stored \
in numbers, a few hundred million or a few hundred billion of them, and no one can point to the number in which Rome \
is kept.

Shopping list: 2 l milk, 500 g flour, 6 eggs, 250 g butter, yeast, lemons (4), coffee, toothpaste, batteries AA, a \
birthday card for Tom, something nice for dessert. Don't forget to take the empty bottles back!
"""
